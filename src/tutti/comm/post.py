"""A rank's messages: what it sends to the other ranks of its host, and what it finds from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from tutti.comm.arena import Arena
from tutti.comm.base import ANY
from tutti.comm.control import Layout
from tutti.comm.rings import HEADER, PIECE, Arrival, Inbox, Outbox, as_bytes
from tutti.comm.waiting import Peers, wait

CHECK_EVERY_S: Final = 0.01
"""How often a rank that looks for messages without waiting also looks who has died."""

STALLS: Final = 8
"""After how many vain tries an exchange looks whether others wait for room here, too."""


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
        self._next_check_s = 0.0

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
            self._absorb()
            return outbox.room >= nbytes

        wait(ready, self._peers, self._words, [(to, self._names[to])])

    def _absorb(self) -> None:
        """Take in all that has come: whoever should make room for us may itself wait for room here."""
        for inbox in self._inboxes_with_messages():
            inbox.absorb()

    def recv(self, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        """Overwrite `vector` with a message; returns the sender."""
        body = as_bytes(vector)
        found = self._find(source, tag) or self._wait_for_message(source, tag)
        sender, inbox, arrival = found
        if not arrival.fits(vector):
            raise unlike(sender, tag, arrival, vector)
        needed = [(sender, self._names[sender])]
        while not inbox.move(arrival, body):
            # One wait for each piece: naps grow with the time waited, and a long message takes long.
            before = arrival.filled

            def flows(before: int = before) -> bool:
                inbox.move(arrival, body)
                return arrival.filled > before

            wait(flows, self._peers, self._words, needed)
        inbox.finish(arrival, body)
        return sender

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int = 0) -> None:
        """Send `outgoing` to rank `to` while receiving `incoming` from rank `source`."""
        if self._rank in (to, source):
            # Nobody can be waiting for us to receive what we have not yet sent.
            self.send(outgoing, to, tag)
            self.recv(incoming, source, tag)
            return
        exchange = _Exchange(self, outgoing, to, incoming, source, tag)
        while not exchange.complete:
            wait(exchange.go_on, self._peers, self._words, exchange.needed())
        exchange.finish()

    def waiting(self, tag: int, source: int) -> int | None:
        """Who has sent a message that can be received now."""
        found = self._find(source, tag)
        if found is None and (now := time.monotonic()) >= self._next_check_s:
            self._next_check_s = now + CHECK_EVERY_S
            self._peers.check()
            # Whoever has left may have sent something with its last breath.
            found = self._find(source, tag)
        return found[0] if found else None

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


class _Exchange:
    """A message out and one in, both moved on together. The arguments are those of `Post.exchange`."""

    def __init__(
        self, post: Post, outgoing: Tensor, to: int, incoming: Tensor, source: int, tag: int
    ) -> None:
        self._post, self._outgoing, self._incoming, self._tag = post, outgoing, incoming, tag
        self._to, self._source = to, source
        self._outbox, self._inbox = post._outbox(to), post._inbox(source)
        self._out, self._in = as_bytes(outgoing), as_bytes(incoming)
        self._begun = False
        self._stalls = self._sent = 0
        self._arrival: Arrival | None = None

    @property
    def _all_sent(self) -> bool:
        return self._begun and self._sent == len(self._out)

    @property
    def _all_received(self) -> bool:
        arrival = self._arrival
        # A message that does not fit stays where it is; ours goes out before that is said.
        return arrival is not None and (not arrival.fits(self._incoming) or arrival.complete)

    @property
    def complete(self) -> bool:
        """Whether both messages have gone as far as they go."""
        return self._all_sent and self._all_received

    def needed(self) -> list[tuple[int, int]]:
        """Whom this waits for, each with its number in the job."""
        ranks = [self._to] * (not self._all_sent) + [self._source] * (not self._all_received)
        return [(rank, self._post._names[rank]) for rank in ranks]

    def go_on(self) -> bool:
        """Move on what can be moved without waiting; returns whether anything could, or nothing is left."""
        moved = self._receive() | self._send()
        self._stalls = 0 if moved else self._stalls + 1
        if self._stalls % STALLS == STALLS - 1 and not self._all_sent:
            self._post._absorb()
        # What came in may have been completed while all inboxes were emptied.
        return moved or self.complete

    def _receive(self) -> bool:
        if self._all_received:
            return False
        found = self._arrival is None
        if self._arrival is None:
            self._arrival = self._inbox.find(self._tag)
        arrival = self._arrival
        if arrival is None:
            return False
        before = arrival.filled
        if arrival.fits(self._incoming):
            self._inbox.move(arrival, self._in)
        return found or arrival.filled > before

    def _send(self) -> bool:
        if self._all_sent:
            return False
        if not self._begun:
            if self._outbox.room < HEADER:
                return False
            self._outbox.begin(self._tag, self._outgoing)
            self._begun = True
        elif self._outbox.room < min(PIECE, len(self._out) - self._sent):
            return False
        else:
            self._sent = self._outbox.put(self._out, self._sent)
        return True

    def finish(self) -> None:
        """See that what came in is in its place.

        Raises:
            ValueError: it has another length or dtype than the vector that was to receive it.
        """
        arrival = self._arrival
        assert arrival is not None, "finish is called once all is received"
        if not arrival.fits(self._incoming):
            raise unlike(self._source, self._tag, arrival, self._incoming)
        self._inbox.finish(arrival, self._in)


def unlike(sender: int, tag: int, arrival: Arrival, vector: Tensor) -> ValueError:
    """The error that a message does not fit the vector that is to receive it."""
    return ValueError(
        f"rank {sender} sent {arrival} with tag {tag}, but the vector to receive it has {vector.numel()} "
        f"elements of {vector.dtype}; receive it into a vector like the one that is sent"
    )
