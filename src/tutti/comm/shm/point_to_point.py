"""A rank's messages to and from the other ranks of its host: generators, many at the same time.

    send   [1] wait for its turn among the sends to one rank, and for room for a header
           [2] put the header   [3] put the body, piece by piece, as room comes free
    recv   [4] find the message: those before it in the ring are moved out of it
           [5] move the body out of the ring as it comes, into the vector

All sends to one rank share one ring, in which a header is followed by its body: [1] keeps a second send from
putting its header between the pieces of the first one's body.

Two ranks that send each other more than the rings hold would wait in [1] or [3] for ever, as neither
receives. So a sender that waits for room takes the messages that have come for it out of their rings into
its own memory, which makes room for the others. `rings` says why no lock is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from torch import Tensor

from tutti.comm.base import ANY
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.layout import HostGroup
from tutti.comm.shm.rings import HEADER, PIECE, Arrival, Inbox, Outbox, as_bytes
from tutti.errors import CallsDiffer

STALLS: Final = 8
"""The number of vain tries after which a sender makes room for others, who may wait to send to it, too."""


class Receiving:
    """A requested receive."""

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag, self.sender = source, tag, source

    def competes(self, other: Receiving) -> bool:
        """Return whether one message could be for either of the two."""
        return self.tag == other.tag and (ANY in (self.source, other.source) or self.source == other.source)

    def is_first(self, asked: Iterable[Receiving]) -> bool:
        """Return whether no receive that was asked for earlier may want the message that this one gets."""
        return not any(one.competes(self) for one in takewhile(lambda one: one is not self, asked))


class HostMessages:
    """The messages that one rank of a group sends and receives."""

    def __init__(self, group: HostGroup) -> None:
        self._group, self._rank = group, group.rank
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._sending: dict[int, deque[object]] = {}
        self._receiving: list[Receiving] = []

    def send(self, vector: Tensor, to: int, tag: int) -> Steps:
        """Send `vector`; it may be overwritten at the end. Messages to one rank keep their order."""
        if to == self._rank:
            self._inbox(to).deliver(tag, vector)
            return
        outbox, turn = self._outbox(to), object()
        waiting = self._sending.setdefault(to, deque())
        waiting.append(turn)
        try:
            stalls = 0
            while waiting[0] is not turn or outbox.room < HEADER:  # [1]
                stalls = self._stall(stalls)
                yield False
            outbox.begin(tag, vector)  # [2]
            body, done = as_bytes(vector), 0
            while done < len(body):
                while outbox.room < min(PIECE, len(body) - done):
                    stalls = self._stall(stalls)
                    yield False
                done = outbox.put(body, done)  # [3]
                yield True
        finally:
            waiting.remove(turn)

    def _stall(self, stalls: int) -> int:
        if stalls % STALLS == STALLS - 1:
            for inbox in self._with_messages():
                inbox.absorb()
        return stalls + 1

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int) -> Steps:
        """Send a vector, and receive one, at the same time."""
        going = self.send(outgoing, to, tag)
        return run_together([(going, to), (self.recv(incoming, Receiving(source, tag)), source)])

    def recv(self, vector: Tensor, receiving: Receiving) -> Steps:
        """Overwrite `vector` with the next message that `receiving` asks for; CallsDiffer if it does not fit.

        Receives that compete for a message get theirs in the order in which they were requested.
        """
        self._receiving.append(receiving)
        try:
            while (found := self.find(receiving)) is None:  # [4]
                yield False
            inbox, arrival = found
            body = as_bytes(vector)
            if not arrival.fits(vector):
                names = self._group.global_ranks
                raise CallsDiffer(
                    f"rank {names[inbox.sender]} sent {arrival} with tag {arrival.tag}, but the tensor "
                    f"to receive it in rank {names[self._rank]} has {vector.numel()} elements of "
                    f"{vector.dtype}; receive it into a tensor like the one that is sent"
                )
            before = arrival.filled
            while not inbox.move(arrival, body):  # [5]
                yield arrival.filled > before
                before = arrival.filled
            inbox.finish(arrival, body)
        finally:
            self._receiving.remove(receiving)

    def find(self, receiving: Receiving) -> tuple[Inbox, Arrival] | None:
        """Return the first message here that `receiving` asks for, and note its sender."""
        if not receiving.is_first(self._receiving):
            return None
        first: tuple[Inbox, Arrival] | None = None
        source = receiving.source
        for inbox in [self._inbox(source)] if source != ANY else self._with_messages():
            arrival = inbox.find(receiving.tag)
            if arrival is not None and (first is None or arrival.stamp < first[1].stamp):
                first = inbox, arrival
        if first is not None:
            receiving.sender = first[0].sender
        return first

    def _with_messages(self) -> list[Inbox]:
        # A ring that nothing was ever sent through is not even mapped. A count that is seen late is found
        # next time.
        words, layout = self._group.words, self._group.layout
        senders = [sender for sender in range(self._group.size) if words[layout.sent(sender, self._rank)]]
        return [self._inbox(sender) for sender in dict.fromkeys([*self._inboxes, *senders])]

    def _inbox(self, sender: int) -> Inbox:
        if sender not in self._inboxes:
            self._inboxes[sender] = Inbox(self._group, sender, self._rank)
        return self._inboxes[sender]

    def _outbox(self, receiver: int) -> Outbox:
        if receiver not in self._outboxes:
            self._outboxes[receiver] = Outbox(self._group, self._rank, receiver)
        return self._outboxes[receiver]


def run_together(under_way: list[tuple[Steps, int]]) -> Steps:
    """Advance several messages, each with the rank that it waits for; drop the finished ones.

    An error of one is raised when the others are over.
    """
    wrong: Exception | None = None
    while under_way:
        moved = False
        for message in tuple(under_way):
            try:
                moved |= next(message[0])
                continue
            except StopIteration:
                pass
            except Exception as error:
                wrong = error
            under_way.remove(message)
            moved = True
        yield moved
    if wrong is not None:
        raise wrong
