"""A worker's view of a centre on server ranks; the servers' side is in `server`.

Each server has a slice of every vector and serves its requests in the order in which they come.

    worker 0   │ slice a ▶ server 0, slice b ▶ server 1 │ waits │ ◀ answer a, ◀ answer b │ backward ...
    worker 1        │ slice a ▶, slice b ▶ │ waits, while worker 0 is served │ ◀ answer a, ◀ answer b │
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from typing_extensions import override

from tutti.comm.base import Communicator, Servers
from tutti.parameter_server.base import Centre, Receipt, Rule, Vectors
from tutti.parameter_server.protocol import (
    ANSWER,
    BODY,
    REQUEST,
    WEIGHTS,
    Request,
    header,
    receive_all,
    receive_held,
    send_all,
    send_held,
)
from tutti.replica import Flat
from tutti.state import LocalState, Saved, State, whole_piece

_OF_MODEL: Final = "weights/"
"""The first word of the names of the model's tensors in a checkpoint."""


class ServedCentre(Centre):
    """One worker's view of a centre on servers (collective over the workers `comm`).

    The weights of worker 0 are the centre's first ones; the rule's settings are read at every message.
    """

    def __init__(self, comm: Communicator, servers: Servers, flats: Sequence[Flat], rule: Rule) -> None:
        self._workers, self._comm, self._rule = comm, servers.comm, rule
        self._slots = rule.cut(flats, len(servers.ranks))
        self._servers = servers.ranks[: len(self._slots)]
        self._idle = servers.ranks[len(self._slots) :]
        self._answer = torch.zeros(3, dtype=torch.float64)
        self._version, self._seen_at = 0, comm.clock()
        # Another worker's message may be faster than these weights: it waits for the servers to be ready.
        if comm.rank == 0:
            for server, slot in zip(self._servers, self._slots, strict=True):
                self._ask(server, Request.BEGIN, comm.hosts)
                send_all(self._comm, slot.views([flat.weights for flat in flats]), server, BODY)
            self._take(None)
        comm.barrier()

    @property
    @override
    def version(self) -> int:
        return self._version

    def _ask(self, server: int, request: Request, detail: float = 0) -> int:
        message = header(request, detail, self._rule.settings())
        self._comm.send(message, server, REQUEST)
        return message.nbytes

    def _ask_all(self, request: Request, detail: float = 0) -> int:
        return sum([self._ask(server, request, detail) for server in self._servers])

    def _bring(self, request: Request, message: Vectors, again: bool, at: Vectors) -> int:
        """Send the message to all servers; return its bytes."""
        sent = 0
        for server, slot in zip(self._servers, self._slots, strict=True):
            sent += self._ask(server, request, float(again))
            if not again:
                sent += send_all(self._comm, slot.views(message), server, BODY)
            if at:
                sent += send_all(self._comm, slot.views(at), server, BODY)
        return sent

    def _take(self, into: Vectors | None) -> tuple[int, bool]:
        """Receive all answers; returns the largest staleness, and whether a server dropped the message."""
        staleness, dropped, versions = 0, False, []
        slots = dict(zip(self._servers, self._slots, strict=True))
        for _ in slots:
            # As they come: a server waits until its answer is taken, and others may wait for that server.
            server = self._comm.recv(self._answer, tag=ANSWER)
            version, stale, late = (int(value) for value in self._answer.tolist())
            versions.append(version)
            staleness, dropped = max(staleness, stale), dropped or bool(late)
            if into is not None:
                receive_all(self._comm, slots[server].views(into), server, WEIGHTS)
        self._version = min(versions)
        return staleness, dropped

    @override
    @torch.no_grad()
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        began = self._comm.clock()
        sent = self._bring(Request.PUSH, message, again, at)
        now = self._comm.clock()
        return Receipt(None, now - self._seen_at, now - began, sent)

    @override
    @torch.no_grad()
    def exchange(self, message: Vectors, reply: Vectors | None = None, at: Vectors = ()) -> Receipt:
        began = self._comm.clock()
        sent = self._bring(Request.EXCHANGE, message, False, at)
        return self._receipt(began, sent, message if reply is None else reply)

    @override
    @torch.no_grad()
    def pull(self, into: Vectors) -> Receipt:
        began = self._comm.clock()
        return self._receipt(began, self._ask_all(Request.PULL), into)

    def _receipt(self, began: float, sent: int, into: Vectors) -> Receipt:
        staleness, dropped = self._take(into)
        now = self._comm.clock()
        age_s, self._seen_at = now - self._seen_at, now
        return Receipt(staleness, age_s, now - began, sent, dropped)

    @override
    @torch.no_grad()
    def read(self, into: Vectors) -> None:
        self._flush()
        self._ask_all(Request.READ, detail=1)
        self._take(into)
        self._workers.barrier()

    def _flush(self) -> None:
        """Wait until the servers have served every earlier request of any worker."""
        self._ask_all(Request.READ)
        self._take(None)
        self._workers.barrier()

    @override
    @torch.no_grad()
    def tick(self, slack: int, into: Vectors) -> Receipt:
        began = self._comm.clock()
        return self._receipt(began, self._ask_all(Request.TICK, slack), into)

    @override
    def leave(self) -> None:
        self._ask_all(Request.LEAVE)

    @override
    def rejoin(self) -> None:
        self._workers.barrier()
        self._ask_all(Request.REJOIN)
        self._flush()

    @override
    def state(self) -> State:
        """Return, on worker 0, what the servers' rules keep."""
        state = State()
        for server in self._servers if self._workers.rank == 0 else ():
            self._ask(server, Request.STATE)
            state.joint.add(receive_held(self._comm, server))
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        if self._workers.rank == 0:
            tensors = saved.joint.tensors.items()
            kept = [whole_piece(name, one) for name, one in tensors if not name.startswith(_OF_MODEL)]
            for server in self._servers:
                self._ask(server, Request.RESTORE)
                send_held(self._comm, LocalState(kept, dict(saved.joint.numbers)), server)
            self._take(None)
        self._workers.barrier()

    @override
    def close(self) -> None:
        for server in (*self._servers, *self._idle):
            self._ask(server, Request.CLOSE)
