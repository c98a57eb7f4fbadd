"""Messages of the virtual communicator that were sent and not yet received."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.virtual.scheduler import RankTask


@dataclass(eq=False)
class Message:
    """A vector on its way, or arrived.

    Attributes:
        vector: a copy of what was sent.
        source: the sender, numbered in the communicator.
        tag: the tag it was sent with.
        arrival_s: when its last byte is there.
    """

    vector: Tensor
    source: int
    tag: int
    arrival_s: float
    taken: bool = False


class Mailbox:
    """The messages to one rank of one communicator; all operations take O(log messages)."""

    def __init__(self, owner: RankTask) -> None:
        self.owner = owner
        self._number = count()
        self._from: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._all: dict[int, list[tuple[float, int, int, Message]]] = defaultdict(list)
        self._wanted: tuple[int, int] | None = None

    def want(self, source: int, tag: int) -> None:
        """The owner waits for such a message, until `want_nothing`."""
        self._wanted = (source, tag)

    def want_nothing(self) -> None:
        """The owner waits no more."""
        self._wanted = None

    def put(self, message: Message) -> bool:
        """Add a message; returns whether the owner waits for such a one."""
        self._from[message.source, message.tag].append(message)
        entry = (message.arrival_s, message.source, next(self._number), message)
        heapq.heappush(self._all[message.tag], entry)
        return self._wanted in ((message.source, message.tag), (ANY, message.tag))

    def first(self, source: int, tag: int) -> Message | None:
        """The message of `tag` from `source` (or `ANY`) that arrives first, if one was sent."""
        if source != ANY:
            queue = self._from[source, tag]
            return queue[0] if queue else None
        queue_of_all = self._all[tag]
        return queue_of_all[0][3] if queue_of_all else None

    def take(self, message: Message) -> None:
        """Remove a message that `first` returned."""
        message.taken = True
        # Messages of one sender and tag arrive in order, so the earliest of all is its sender's earliest too.
        self._from[message.source, message.tag].popleft()
        queue_of_all = self._all[message.tag]
        while queue_of_all and queue_of_all[0][3].taken:
            heapq.heappop(queue_of_all)


@dataclass(eq=False)
class Port:
    """One end of a link: it carries one message at a time."""

    free_s: float = 0.0

    def carry(self, at: float, seconds: float) -> float:
        """Carry something for `seconds`, from `at` on or when the port is free; returns when it is done."""
        self.free_s = max(at, self.free_s) + seconds
        return self.free_s
