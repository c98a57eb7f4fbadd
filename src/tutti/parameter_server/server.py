"""A server rank, which holds a slice of the centre and serves the workers until all have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.comm.base import Communicator, Servers
from tutti.parameter_server.base import Outcome, Push, Rule
from tutti.parameter_server.protocol import (
    ANSWER,
    BODY,
    REQUEST,
    WEIGHTS,
    Request,
    receive_all,
    receive_held,
    send_all,
    send_held,
)
from tutti.parameter_server.ssp_clock import GONE
from tutti.replica import Replica, copy_all
from tutti.state import named


@dataclass
class _Client:
    """A server's knowledge of a worker."""

    seen: int = 0  # the slot's version when the worker last read it, plus its own messages since
    staleness: int = 0  # of its last message
    last: tuple[Tensor, ...] | None = None  # its last message, if the rule `remembers`
    steps: int = 0  # its step count; `GONE` if it has left
    slack: int | None = None  # the steps that it may be ahead, while it waits for slower workers; else None


class Server:
    """The server of one slot of a centre; without a slot, it waits for the workers to close."""

    def __init__(self, servers: Servers, replica: Replica, rule: Rule) -> None:
        self._comm: Communicator = servers.comm
        self._weights = [flat.weights for flat in replica.flats]
        self._flats, self._rule, self._levels = replica.flats, rule, servers.levels
        self._number, self._count = servers.ranks.index(servers.comm.rank), len(servers.ranks)
        self._clients = {rank: _Client() for rank in range(servers.comm.size) if rank not in servers.ranks}
        settings = (rule.above(hosts=1) if self._levels > 1 else rule).settings()
        self._header = torch.zeros(2 + len(settings), dtype=torch.float64)
        self._version = 0
        self._waiting: list[int] = []

    @torch.no_grad()
    def run(self) -> None:
        """Serve until every worker has closed its connection; raise PeerLost if one is gone."""
        left = set(self._clients)
        while left:
            worker = self._comm.recv(self._header, tag=REQUEST)
            request, detail, *settings = self._header.tolist()
            if request == Request.CLOSE:
                left.discard(worker)
            else:
                self._serve(worker, Request(int(request)), int(detail), settings)

    def _serve(self, worker: int, request: Request, detail: int, settings: list[float]) -> None:
        client = self._clients[worker]
        if request in (Request.PUSH, Request.EXCHANGE):
            self._apply(worker, request is Request.EXCHANGE, bool(detail), settings)
        elif request is Request.PULL:
            self._answer(worker, self._version - client.seen)
        elif request is Request.READ:
            self._send(worker, self._own if detail else ())
        elif request is Request.BEGIN:
            self._begin(worker, hosts=detail)
        elif request is Request.STATE:
            send_held(self._comm, self._rule.state(self._number), worker)
        elif request is Request.RESTORE:
            self._rule.load_state(named([receive_held(self._comm, worker)]))
            self._send(worker, ())
        elif request is Request.TICK:
            client.steps, client.slack = client.steps + 1, detail
            self._wake_up()
        elif request is Request.LEAVE:
            client.steps = GONE
            self._wake_up()
        else:
            assert request is Request.REJOIN
            client.steps = 0

    def _begin(self, worker: int, hosts: int) -> None:
        """Lay out the slot as the workers do, with the weights of worker 0."""
        if self._levels > 1:
            self._rule = self._rule.above(hosts)
        slot = self._rule.cut(self._flats, self._count)[self._number]
        self._own = slot.views(self._weights)
        self._rule.open(self._weights, [slot], lambda length, dtype: torch.zeros(length, dtype=dtype))
        self._message = tuple(map(torch.zeros_like, self._own))
        self._reply = tuple(map(torch.zeros_like, self._own))
        self._then = tuple(map(torch.zeros_like, self._own)) if self._rule.compares else None
        if self._rule.remembers:
            for client in self._clients.values():
                client.last = tuple(map(torch.zeros_like, self._own))
        receive_all(self._comm, self._own, worker, BODY)
        self._send(worker, ())

    def _apply(self, worker: int, wants_answer: bool, again: bool, settings: list[float]) -> None:
        client = self._clients[worker]
        if not again:
            receive_all(self._comm, self._message, worker, BODY)
        if self._then is not None:
            receive_all(self._comm, self._then, worker, BODY)
        if client.last is not None:
            source, target = (client.last, self._message) if again else (self._message, client.last)
            copy_all(target, source)
        client.staleness = self._version - client.seen
        self._rule.use(settings)
        reply = self._reply if wants_answer else None
        push = Push(self._number, self._own, self._message, reply, self._then, client.staleness)
        outcome = self._rule.apply(push)
        if outcome is Outcome.WAITING:
            if wants_answer:
                self._waiting.append(worker)
            return
        if outcome is Outcome.APPLIED:
            self._version += 1
            client.seen += 1
        if wants_answer:
            self._rule.answer(push)
            self._answer(worker, push.staleness, self._reply, late=outcome is Outcome.DROPPED)
        if outcome is Outcome.APPLIED:
            waiting, self._waiting = self._waiting, []
            for other in waiting:
                self._answer(other, 0)

    def _answer(
        self, worker: int, staleness: int, weights: Sequence[Tensor] = (), late: bool = False
    ) -> None:
        """Send the weights, and note that the worker has read them."""
        self._clients[worker].seen = self._version
        self._send(worker, weights or self._own, staleness, late)

    def _send(self, worker: int, weights: Sequence[Tensor], staleness: int = 0, late: bool = False) -> None:
        head = torch.tensor([self._version, staleness, late], dtype=torch.float64)
        self._comm.send(head, worker, ANSWER)
        send_all(self._comm, weights, worker, WEIGHTS)

    def _wake_up(self) -> None:
        """Answer the waiting workers that are no longer too far ahead."""
        slowest = min(client.steps for client in self._clients.values())
        for worker, client in self._clients.items():
            if client.slack is not None and client.steps - slowest <= client.slack:
                client.slack = None
                self._answer(worker, client.staleness)
