"""Asynchronous decentralized SGD: each worker averages with one other at a time, and waits for nobody.

On one host the two meet in shared memory, across hosts by messages.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State, fill_all, pieces_of_all
from tutti.strategies.averaged import AveragedWorker, PeerStrategy, mean
from tutti.strategies.base import Clip, Pace, Worker
from tutti.strategies.edits import Edits
from tutti.strategies.options import choice, whole

CALL: Final = 7310
"""Tag of the word with which an active worker announces weights, or a pause."""
OUT: Final = 7320
"""Tag of the first of an active worker's vectors of weights; further ones have the next numbers."""
BACK: Final = 7340
"""Tag of the first of the answers."""
ROW: Final = "row"
"""The first word of the names of the weights that others average with, in a checkpoint."""


class PairWorker(AveragedWorker):
    """A worker that chooses another at random every so many batches."""

    def __init__(
        self, strategy: ADPSGD, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(replica, comm, optimizer, clip)
        beside = [(comm.rank + hop) % comm.size for hop in (1, -1)]
        near = beside if strategy.graph == "ring" else range(comm.size)
        self.neighbours = sorted({rank for rank in near if rank != comm.rank})
        self.nbytes = sum(weights.nbytes for weights in self.weights)
        self._every, self._random = strategy.every, Random(f"{strategy.seed}/{comm.rank}")
        self.read_at = comm.clock()

    def choose(self, neighbours: list[int]) -> int | None:
        """Count a step, and return the neighbour to average with in it, if one is due."""
        self.rounds += 1
        due = self.rounds % self._every == 0
        return self._random.choice(neighbours) if due and neighbours else None

    @property
    @override
    def anew(self) -> tuple[str, ...]:
        return (*super().anew, "the order in which each worker chooses others")

    @override
    def state(self) -> State:
        state = super().state()
        state.own |= {"rounds": self.rounds, "random": list(self._random.getstate())}
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        if saved.own is not None:
            self.rounds = saved.own["rounds"]
            version, words, gauss = saved.own["random"]
            self._random.setstate((version, tuple(words), gauss))


class RowWorker(PairWorker):
    """A worker that averages in shared memory: its weights are a row there, and the replica a copy."""

    def __init__(
        self, strategy: ADPSGD, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._locks = comm.locks(comm.size)
        self._rows = [comm.shared(comm.size, len(w), dtype=w.dtype) for w in self.weights]
        # How often the others have moved each row.
        self._moved, self._seen = comm.shared(comm.size, dtype=torch.int64), 0
        self._row = [rows[comm.rank] for rows in self._rows]
        copy_all(self._row, self.weights)
        self._edits = Edits(replica)
        comm.barrier()

    @override
    @torch.no_grad()
    def step(self) -> None:
        self._bring_edits()
        partner = self.choose(self.neighbours)
        wait_s = 0.0 if partner is None else self._meet(partner)
        began, rank = self.comm.clock(), self.comm.rank
        with self._locks[rank]:
            wait_s += self.comm.clock() - began
            copy_all(self.weights, self._row)
            self.move()
            copy_all(self._row, self.weights)
            moved = int(self._moved[rank])
        self._edits.note()
        now = self.comm.clock()
        if partner is None:
            self.traffic.wait_s += wait_s
        else:
            self.traffic.add(self.nbytes, wait_s, moved - self._seen, now - self.read_at)
        self._seen, self.read_at = moved, now

    def _bring_edits(self) -> None:
        """Move the row by what the loop has changed in the weights since they were read from it."""
        moves = self._edits.take()
        if moves:
            with self._locks[self.comm.rank]:
                for row, move in zip(self._row, moves, strict=True):
                    row.add_(move)

    def _meet(self, partner: int) -> float:
        """Average with `partner`; returns the seconds waited for the locks."""
        began, rank = self.comm.clock(), self.comm.rank
        with ExitStack() as held:
            for one in sorted((rank, partner)):
                held.enter_context(self._locks[one])
            waited = self.comm.clock() - began
            for row in self._rows:
                mean(row[rank], [row[rank], row[partner]])
                row[partner].copy_(row[rank])
            self._moved[partner] += 1
        return waited

    @override
    @torch.no_grad()
    def agree(self) -> None:
        self._bring_edits()
        self.comm.barrier()  # Nobody moves another's row any more.
        copy_all(self.weights, self._row)
        super().agree()

    @override
    @torch.no_grad()
    def adopt(self) -> None:
        super().adopt()
        self.comm.barrier()  # Nobody moves another's row any more.
        copy_all(self._row, self.weights)
        self._seen = int(self._moved[self.comm.rank])
        self._edits.note()
        self.comm.barrier()  # Nobody reads another's row before all have been overwritten.

    @override
    def resume(self) -> None:
        self.comm.barrier()  # Nobody moves another's row before all have seen theirs.
        super().resume()

    @override
    def state(self) -> State:
        """Add the row: others may have moved it since the weights were read from it."""
        state = super().state()
        state.alone.pieces += pieces_of_all(ROW, self.replica.flats, self._own_rows())
        return state

    @override
    @torch.no_grad()
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        if saved.alone is not None:
            fill_all(saved.alone.tensors, ROW, self.replica.flats, self._own_rows())
        self._edits.note()
        self.comm.barrier()  # Nobody reads another's row before all have theirs.

    def _own_rows(self) -> list[Tensor]:
        return [row[self.comm.rank] for row in self._rows]


class MessageWorker(PairWorker):
    """A worker that averages by messages: even ranks ask, odd ones answer."""

    def __init__(
        self, strategy: ADPSGD, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self._active = comm.rank % 2 == 0
        self._askable = [rank for rank in self.neighbours if rank % 2] if self._active else []
        self._asked: int | None = None
        self._pauses = 0
        self._buffers = [torch.empty_like(weights) for weights in self.weights]

    @override
    @torch.no_grad()
    def step(self) -> None:
        began, moved, sent = self.comm.clock(), 0, 0
        if not self._active:
            while self.comm.waiting(CALL) is not None:
                moved += self._answer()
            sent = moved * self.nbytes
        elif self._asked is not None and self.comm.waiting(BACK, self._asked) is not None:
            self._take_answer(self._asked)
            moved = 1
        partner = self.choose(self._askable)
        if partner is not None and self._asked is None:
            self._ask(partner)
            sent += self.nbytes
        now = self.comm.clock()
        if moved:
            self.traffic.add(sent, now - began, moved, now - self.read_at)
        else:
            self.traffic.bytes_sent += sent
            self.traffic.wait_s += now - began
        self.move()
        self.read_at = self.comm.clock()

    def _ask(self, partner: int) -> None:
        self.comm.send(torch.ones(1, dtype=torch.int64), partner, CALL)
        for number, weights in enumerate(self.weights):
            self.comm.send(weights, partner, OUT + number)
        self._asked = partner

    def _take_answer(self, partner: int) -> None:
        for number, (weights, buffer) in enumerate(zip(self.weights, self._buffers, strict=True)):
            self.comm.recv(buffer, partner, BACK + number)
            weights.sub_(buffer)
        self._asked = None

    def _answer(self) -> int:
        """Take the next call, waiting for it if need be; returns how many averages that made, 0 or 1."""
        call = torch.zeros(1, dtype=torch.int64)
        source = self.comm.recv(call, tag=CALL)
        if not int(call):
            self._pauses += 1
            return 0
        for number, (weights, buffer) in enumerate(zip(self.weights, self._buffers, strict=True)):
            self.comm.recv(buffer, source, OUT + number)
            half_way(weights, buffer)
            weights.add_(buffer)
            self.comm.send(buffer, source, BACK + number)
        return 1

    @override
    @torch.no_grad()
    def settle(self) -> None:
        self._come_to_rest()
        super().settle()

    @override
    @torch.no_grad()
    def finish(self) -> None:
        self._come_to_rest()
        super().finish()

    @override
    @torch.no_grad()
    def adopt(self) -> None:
        super().adopt()
        new = [weights.clone() for weights in self.weights]
        self._come_to_rest()  # Averages that were under way may move the weights once more.
        copy_all(self.weights, new)
        self.comm.barrier()  # Nobody asks before all have theirs.

    def _come_to_rest(self) -> None:
        """Wait until no message is under way between any two workers (collective)."""
        if self._active:
            if self._asked is not None:
                self._take_answer(self._asked)
            for passive in range(1, self.comm.size, 2):
                self.comm.send(torch.zeros(1, dtype=torch.int64), passive, CALL)
            return
        active = (self.comm.size + 1) // 2
        while self._pauses < active:
            self._answer()
        self._pauses -= active


GRAPHS: Final = ("all", "ring")


@part("adpsgd")
@dataclass(frozen=True)
class ADPSGD(PeerStrategy):
    """Asynchronous decentralized parallel SGD (AD-PSGD): averages of random pairs, without waiting.

        g_i = grad l(x_i)
        x_i, x_j = (x_i + x_j) / 2            with a random neighbour j, as one operation
        x_i = optimizer(x_i, g_i)             g_i is from before the average, and x_i may have changed since

    On one host each worker's weights have a row in shared memory and a lock. Both locks are taken in the
    order of ranks, so no two workers ever wait for each other.

    Across hosts the even ranks are active and the odd ones passive. An active worker sends its weights,
    computes on, and adds what comes back when it has come; it has one exchange under way at a time. A passive
    one answers between two batches, and moves the other way by the same amount, so that no weight is lost or
    made. Active workers ask, passive ones answer: no circle of waiting can arise.

        active 0    │ step │ x0 ──┐ step │ x0 += d │ step │
        passive 1   │ step         └ x1 -= d, d ───┘  step │          d = (x1 - x0) / 2

    `graph`: "all" (any other worker) or "ring" (the two beside it). A batch is one worker's own, and so is
    the optimizer's state. What is evaluated and kept is the average of all workers. The paper averages in
    every step (`every` 1), while the gradient is computed; here that is between two computations on one host,
    and beside them between hosts.

    Source: Lian, Zhang, Zhang, Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    arXiv:1710.06952, algorithm 1; active and passive workers: section 3.
    """

    pace: ClassVar[Pace] = Pace.FREE

    graph: str = choice("all", "who averages with whom", GRAPHS)
    every: int = whole(1, "batches of a worker between two averages")
    seed: int = whole(0, "decides the random neighbours", least=0)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        kind = RowWorker if comm.hosts == 1 else MessageWorker
        return kind(self, replica, comm, optimizer, clip)


def half_way(mine: Tensor, theirs: Tensor) -> None:
    """Overwrite `theirs` with the step that takes a worker half-way to another, which subtracts it.

        d = (x_j - x_i) / 2          x_i = x_i + d          x_j = x_j - d

    Both are then at (x_i + x_j) / 2, and their sum is what it was, even if d arrives later.

    Source: algorithm 1, step 4, of the paper that `ADPSGD` names.

    Args:
        mine: x_i.
        theirs: x_j; overwritten with d.
    """
    theirs.sub_(mine).div_(2)
