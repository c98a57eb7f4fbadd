"""A rank's messages: what it sends to the other ranks of its host, and what it finds from them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tutti.comm.arena import Arena
from tutti.comm.base import ANY
from tutti.comm.control import Layout
from tutti.comm.rings import HEADER, PIECE, Arrival, Inbox, Outbox, as_bytes
from tutti.comm.waiting import Peers, wait


class Post:
    """The messages of one rank of a communicator. Its arguments are that communicator's own."""

    def __init__(
        self, arena: Arena, block: int, words: memoryview, rank: int, names: Sequence[int], peers: Peers
    ) -> None:
        self._arena, self._block, self._words, self._peers = arena, block, words, peers
        self._rank, self._size, self._names = rank, len(names), tuple(names)
        self._layout = Layout(self._size)
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}

    def send(self, vector: Tensor, to: int, tag: int = 0) -> None:
        """Send `vector` to rank `to`."""
        if to == self._rank:
            self._inbox(to).deliver(tag, vector)
            return
        outbox, body, done = self._outbox(to), as_bytes(vector), 0
        self._wait_for_room(outbox, HEADER, to)
        outbox.begin(tag, vector)
        while done < len(body):
            self._wait_for_room(outbox, min(PIECE, len(body) - done), to)
            done = outbox.put(body, done)

    def _wait_for_room(self, outbox: Outbox, nbytes: int, to: int) -> None:
        if outbox.room >= nbytes:
            return

        def ready() -> bool:
            # Whoever should make room may itself be waiting for room to send to us.
            for inbox in self._inboxes_with_messages():
                inbox.absorb()
            return outbox.room >= nbytes

        wait(ready, self._peers, self._words, [(to, self._names[to])])

    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        """Overwrite `vector` with a message; returns the sender."""
        body = as_bytes(vector)
        found = self._find(source, tag) or self._wait_for_message(source, tag)
        sender, inbox, arrival = found
        if arrival.nbytes != len(body) or arrival.dtype != vector.dtype:
            raise ValueError(
                f"rank {sender} sent {arrival} with tag {tag}, but the vector to receive it has {vector.numel()} "
                f"elements of {vector.dtype}; give recv a vector like the one that is sent"
            )
        if not inbox.move(arrival, body):
            needed = [(sender, self._names[sender])]
            wait(lambda: inbox.move(arrival, body), self._peers, self._words, needed)
        inbox.finish(arrival, body)
        return sender

    def _wait_for_message(self, source: int, tag: int) -> tuple[int, Inbox, Arrival]:
        needed = [
            (rank, name)
            for rank, name in enumerate(self._names)
            if rank != self._rank and source in (ANY, rank)
        ]
        if not needed:
            raise ValueError(
                f"rank {self._rank} waits for a message from itself with tag {tag} that it has not sent"
            )
        found: list[tuple[int, Inbox, Arrival]] = []

        def ready() -> bool:
            if not found and (one := self._find(source, tag)) is not None:
                found.append(one)
            return bool(found)

        wait(ready, self._peers, self._words, needed)
        return found[0]

    def _find(self, source: int, tag: int) -> tuple[int, Inbox, Arrival] | None:
        """The message that was sent first of those from `source` with this tag that are here."""
        first = None
        for inbox in [self._inbox(source)] if source != ANY else self._inboxes_with_messages():
            arrival = inbox.find(tag)
            if arrival is not None and (first is None or arrival.stamp < first[2].stamp):
                first = (inbox.sender, inbox, arrival)
        return first

    def _inboxes_with_messages(self) -> list[Inbox]:
        words, layout = self._words, self._layout
        senders = [sender for sender in range(self._size) if words[layout.sent(sender, self._rank)]]
        return [self._inbox(sender) for sender in dict.fromkeys([*self._inboxes, *senders])]

    def _inbox(self, sender: int) -> Inbox:
        if sender not in self._inboxes:
            self._inboxes[sender] = Inbox(
                self._arena, self._block, self._words, sender, self._rank, self._size
            )
        return self._inboxes[sender]

    def _outbox(self, receiver: int) -> Outbox:
        if receiver not in self._outboxes:
            self._outboxes[receiver] = Outbox(
                self._arena, self._block, self._words, self._rank, receiver, self._size
            )
        return self._outboxes[receiver]
