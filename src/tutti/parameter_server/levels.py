"""Two levels of centres: one in the shared memory of each host, and one on servers above them all.

    host a   worker 0 ─┐                                       after `server_period` exchanges of a host's
             worker 1 ─┴─ centre of a ──┐                      workers with its centre, the last of them
                                        ├── centre above       exchanges that centre with the one above
    host b   worker 2 ─┐                │
             worker 3 ─┴─ centre of b ──┘

The message to the centre above depends on the rule (`Rule.above`). Elastic centres attract each other, as
workers and centre do. Other centres send their moves since their last exchange; the one above adds these, and
they continue from its weights plus their moves meanwhile. Where all agree on weights, as for an evaluation,
every centre continues from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from tutti.comm.base import Communicator, Servers
from tutti.errors import BadOption
from tutti.parameter_server.base import Centre, Receipt, Rule, Vectors
from tutti.parameter_server.client import ServedCentre
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.replica import Flat, copy_all
from tutti.state import Saved, State


class LevelledCentre(Centre):
    """One worker's view of two levels of centres (collective over the workers); `rule` is the hosts'."""

    def __init__(self, comm: Communicator, servers: Servers, flats: Sequence[Flat], rule: Rule) -> None:
        above = rule.above(comm.hosts)
        self._comm, self._server_period = comm, servers.server_period
        self._host = SharedCentre(comm.node, flats, rule)
        self._above = ServedCentre(comm, servers, flats, above)
        self._brings_weights = above.brings_weights
        self._exchanges, self._counting = comm.node.shared(1, dtype=torch.int64), comm.node.lock()
        # This host's centre at its last exchange with the one above, by any of the workers.
        self._known = [comm.node.shared(len(flat.weights), dtype=flat.weights.dtype) for flat in flats]
        self._here = [torch.zeros_like(flat.weights) for flat in flats]
        self._message = [torch.zeros_like(flat.weights) for flat in flats]
        self._above_lock = comm.node.lock()
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
        with self._counting:
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
        """Exchange this host's centre with the one above; return the bytes sent."""
        with self._above_lock:
            self._host.copy(self._here)
            copy_all(self._message, self._here)
            if not self._brings_weights:
                for message, known in zip(self._message, self._known, strict=True):
                    message.sub_(known)
            answer = self._message if self._brings_weights else self._known
            receipt = self._above.exchange(self._message, answer)
            for here, new in zip(self._here, answer, strict=True):
                torch.sub(new, here, out=here)
            self._host.move(self._here)
        return receipt.bytes_sent

    @override
    @torch.no_grad()
    def read(self, into: Vectors) -> None:
        """Exchange each host's centre with the one above, whose weights all centres then take."""
        self._comm.barrier()
        if self._comm.node.rank == 0:
            self._exchange_above()
        self._above.read(into)
        if self._comm.node.rank == 0:
            copy_all(self._known, into)
            self._exchanges.zero_()
        self._host.overwrite(into)

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
        """Return the state of the first host's optimizer for all, and of each other host's for itself."""
        state = State()
        if self._comm.node.rank == 0:
            (state.alone if self._comm.rank else state.joint).add(self._host.held(self._host.slots))
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        if self._comm.rank > 0 and saved.alone is not None:
            saved = replace(saved, joint=saved.alone)
        self._host.load_state(saved)

    @override
    def close(self) -> None:
        self._above.close()
