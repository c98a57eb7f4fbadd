"""Two levels of centres: one in the shared memory of each host, and one on servers above them all.

    host a   worker 0 ─┐                                       after `server_period` exchanges of a host's
             worker 1 ─┴─ centre of a ──┐                      workers with its centre, the last of them
                                        ├── centre above       exchanges that centre with the one above
    host b   worker 2 ─┐                │
             worker 3 ─┴─ centre of b ──┘

The message to the centre above depends on the rule (`Rule.above`). Elastic centres pull at each other, as
workers and centre do. All others send what they have moved since their last exchange; the one above adds
that, and they go on from its weights and what they have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import torch
from typing_extensions import override

from tutti.comm.base import Communicator, Servers
from tutti.errors import BadOption
from tutti.parameter_server.base import Centre, Push, Receipt, Rule, Vectors
from tutti.parameter_server.client import ServedCentre
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.replica import Flat, copy_all
from tutti.state import Saved, State, fill_all, pieces_of_all

HOST: Final = "host_weights"
"""The first word of the names of the weights of a host's centre, in a checkpoint."""

KNOWN: Final = "known_above"
"""That of the names of what the centre above knew of them."""

ABOVE: Final = "weights_above"
"""That of the names of the weights of the centre above."""


class LevelledCentre(Centre):
    """One worker's view of two levels of centres (collective over the workers).

    Args:
        rule: of the hosts' centres.
        server_period: as in `Servers`.
    """

    def __init__(
        self, comm: Communicator, servers: Servers, flats: Sequence[Flat], rule: Rule, server_period: int
    ) -> None:
        self._rule_above = above = rule.above(comm.hosts)
        self._comm, self._flats, self._server_period = comm, flats, server_period
        self._host = SharedCentre(comm.node, flats, rule)
        self._above = ServedCentre(comm, servers, flats, above)
        self._brings_weights = above.brings_weights
        self._exchanges = comm.node.shared(1, dtype=torch.int64)
        # What the centre above knew of this host's at their last exchange, by whichever worker.
        self._known = [comm.node.shared(len(flat.weights), dtype=flat.weights.dtype) for flat in flats]
        self._here = [torch.zeros_like(flat.weights) for flat in flats]
        self._message = [torch.zeros_like(flat.weights) for flat in flats]
        # What the centre above had at the last reading.
        self._top = [flat.weights.clone() for flat in flats] if comm.rank == 0 else []
        self._above_lock = comm.node.lock()
        # The first worker of each worker's host.
        self._hosts = cast("list[int]", comm.all_gather_objects(comm.node.broadcast_object(comm.rank)))
        if comm.node.rank == 0:
            copy_all(self._known, [flat.weights for flat in flats])
        comm.barrier()

    @property
    @override
    def version(self) -> int:
        return self._host.version

    @override
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        return self._then_exchange_above(self._host.push(message, again, at))

    @override
    def pull(self, into: Vectors) -> Receipt:
        return self._host.pull(into)

    @override
    def exchange(self, message: Vectors, reply: Vectors | None = None, at: Vectors = ()) -> Receipt:
        return self._then_exchange_above(self._host.exchange(message, reply, at))

    def _then_exchange_above(self, receipt: Receipt) -> Receipt:
        with self._host.guard:
            self._exchanges += 1
            due = int(self._exchanges) % self._server_period == 0
        if not due:
            return receipt
        began = self._comm.clock()
        sent = self._exchange_above()
        wait_s = receipt.wait_s + self._comm.clock() - began
        return replace(receipt, wait_s=wait_s, bytes_sent=receipt.bytes_sent + sent)

    @torch.no_grad()
    def _exchange_above(self) -> int:
        """Exchange this host's centre with the one above; returns the bytes sent."""
        with self._above_lock:
            self._write_message()
            answer = self._message if self._brings_weights else self._known
            receipt = self._above.exchange(self._message, answer)
            for here, new in zip(self._here, answer, strict=True):
                torch.sub(new, here, out=here)
            self._host.move(self._here)
        return receipt.bytes_sent

    def _write_message(self) -> None:
        """Write what this host's centre brings to the one above."""
        self._host.copy(self._here)
        copy_all(self._message, self._here)
        if not self._brings_weights:
            for message, known in zip(self._message, self._known, strict=True):
                message.sub_(known)

    @override
    @torch.no_grad()
    def read(self, into: Vectors) -> None:
        """Read the weights that the centre above would have after one more exchange with each host's.

        No centre moves, so that training goes on as if nobody had looked.
        """
        self._comm.barrier()
        self._above.read(into)
        if self._comm.rank == 0:
            copy_all(self._top, into)
        for leader in sorted(set(self._hosts)):
            if self._comm.rank == leader:
                self._write_message()
            for message in self._message:
                self._comm.broadcast(message, leader)
            self._rule_above.apply(Push(0, tuple(into), tuple(self._message), None))

    @override
    @torch.no_grad()
    def overwrite(self, weights: Vectors) -> None:
        self._host.overwrite(weights)
        if self._comm.node.rank == 0:
            copy_all(self._known, weights)
        if self._comm.rank == 0:
            copy_all(self._top, weights)
        self._above.overwrite(weights)

    @override
    def tick(self, slack: int, into: Vectors) -> Receipt:
        raise BadOption(
            "a bound on staleness needs one level of centres, as a host's does not have what workers of "
            "other hosts have done since it last exchanged with the servers; use '--levels 1'"
        )

    @override
    def leave(self) -> None:
        self._above.leave()

    @override
    def rejoin(self) -> None:
        self._above.rejoin()

    @override
    def state(self) -> State:
        """Return, on the first rank of each host, all that its centre has.

        The state of the first host's optimizer is what goes on at another number of ranks.
        """
        state = State(own={"hosts": self._hosts, "host": self._host.state().own})
        state.own["exchanges"] = int(self._exchanges)
        if self._comm.node.rank == 0:
            held = self._host.held(self._host.slots)
            (state.alone if self._comm.rank else state.joint).add(held)
            state.alone.pieces += pieces_of_all(HOST, self._flats, self._host.weights)
            state.alone.pieces += pieces_of_all(KNOWN, self._flats, self._known)
        if self._comm.rank == 0:
            state.alone.pieces += pieces_of_all(ABOVE, self._flats, self._top)
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        """Go on with all centres, if those of hosts have the same workers; else with the agreed weights."""
        alone, own = saved.alone, saved.own
        if alone is None or own is None or own.get("hosts") != self._hosts:
            self._host.load_state(replace(saved, own=None))
            return
        if self._comm.rank == 0:
            fill_all(alone.tensors, ABOVE, self._flats, self._top)
        self._above.overwrite(self._top)
        if self._comm.node.rank == 0:
            fill_all(alone.tensors, HOST, self._flats, self._host.weights)
            fill_all(alone.tensors, KNOWN, self._flats, self._known)
            self._exchanges.fill_(own["exchanges"])
            if self._comm.rank > 0:
                saved = replace(saved, joint=alone)
        self._host.load_state(saved.part("host"))

    @override
    def close(self) -> None:
        self._above.close()
