"""Asynchronous decentralized SGD: a worker averages with one other worker at a time, and never waits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.registry import part
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies.averaged import AveragedWorker
from tutti.strategies.base import Clip, Pace, Strategy, WeightPlacement, Worker
from tutti.strategies.options import choice, whole

CALL: Final = 7310
"""Tag of the word with which an active worker announces weights, or a pause."""
OUT: Final = 7320
"""Tag of the first of an active worker's vectors of weights; further ones have the next numbers."""
BACK: Final = 7340
"""Tag of the first of the answers."""


class _ADPSGDWorker(AveragedWorker["ADPSGD"]):
    """A worker that averages with random neighbours: even ranks ask, odd ones answer."""

    def __init__(
        self, strategy: ADPSGD, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        # A communicator for this model alone: a loop may have several models.
        apart = comm.split(0, key=comm.rank)
        assert apart is not None, "all ranks gave one color"
        super().__init__(strategy, replica, apart, optimizer, clip)
        self.restarts += ("the order in which each worker chooses others",)
        adjacent = {(comm.rank + hop) % comm.size for hop in (1, -1)}
        near = adjacent if strategy.graph == "ring" else range(comm.size)
        self._active = comm.rank % 2 == 0
        self._neighbours = sorted(rank for rank in near if rank % 2) if self._active else []
        self._random = Random(f"{strategy.seed}/{comm.rank}")
        self._asked: int | None = None
        self._pauses, self._read_at = 0, comm.clock()
        self._buffers = [torch.empty_like(weights) for weights in self.weights]

    @override
    @torch.no_grad()
    def step(self) -> None:
        began, moved = self.comm.clock(), 0
        if not self._active:
            while self.comm.waiting(CALL) is not None:
                moved += self._answer()
        elif self._asked is not None and self.comm.waiting(BACK, self._asked) is not None:
            self._take_answer(self._asked)
            moved = 1
        sent = 0 if self._active else moved
        self.rounds += 1
        if self._neighbours and self.rounds % self.strategy.every == 0:
            partner = self._random.choice(self._neighbours)
            if self._asked is None:
                self._ask(partner)
                sent += 1
        now, nbytes = self.comm.clock(), sum(weights.nbytes for weights in self.weights)
        if moved:
            self.traffic.add(sent * nbytes, now - began, moved, now - self._read_at)
        else:
            self.traffic.bytes_sent += sent * nbytes
            self.traffic.wait_s += now - began
        self.move()
        self._read_at = self.comm.clock()

    @override
    def skip(self) -> None:
        """Do nothing: no other worker waits for this one."""

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
        """Answer the next call, waiting for one if need be; return the number of averages made, 0 or 1."""
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

    @override
    @torch.no_grad()
    def settle(self) -> None:
        self._come_to_rest()
        super().settle()

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

    @override
    @torch.no_grad()
    def finish(self) -> None:
        self._come_to_rest()
        super().finish()


GRAPHS: Final = ("all", "ring")


@part("adpsgd")
@dataclass(frozen=True)
class ADPSGD(Strategy):
    """Asynchronous decentralized parallel SGD (AD-PSGD): random pairs of workers average, without waiting.

        g_i = grad l(x_i)
        x_i, x_j = (x_i + x_j) / 2            with a random neighbour j, as one operation
        x_i = optimizer(x_i, g_i)             g_i is from before the average, and x_i may have changed since

    The even ranks are active and the odd ones passive. An active worker sends its weights, keeps computing,
    and adds the answer when it arrives; it has one exchange under way at a time. A passive worker answers
    between two batches, and moves by the same amount in the other direction, so that the sum of the weights
    stays the same. Only active workers ask and only passive ones answer, so there is no deadlock.

        active 0    │ step │ x0 ──┐ step │ x0 += d │ step │
        passive 1   │ step         └ x1 -= d, d ───┘  step │          d = (x1 - x0) / 2

    `graph`: "all" (an active worker asks any passive one) or "ring" (only its two neighbours). Each worker
    has its own batches and its own optimizer state. The average of all workers is evaluated and kept.

    Source: Lian, Zhang, Zhang, Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    arXiv:1710.06952, algorithm 1; active and passive workers: section 3.
    """

    home: ClassVar[WeightPlacement] = WeightPlacement.PRIVATE
    pace: ClassVar[Pace] = Pace.FREE
    joint_norm: ClassVar[bool] = True

    graph: str = choice("all", "who averages with whom", GRAPHS)
    every: int = whole(1, "batches of a worker between two averages")
    seed: int = whole(0, "decides the random neighbours", least=0)

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _ADPSGDWorker(self, replica, comm, optimizer, clip)


def half_way(mine: Tensor, theirs: Tensor) -> None:
    """Overwrite `theirs` with the step that takes a worker half-way to another, which subtracts it.

        d = (x_j - x_i) / 2          x_i = x_i + d          x_j = x_j - d

    Both are then at (x_i + x_j) / 2, and their sum is what it was, even if d arrives later.

    `mine` is x_i; `theirs` is x_j, and becomes d. Source: algorithm 1, step 4, of the paper of `ADPSGD`.
    """
    theirs.sub_(mine).div_(2)
