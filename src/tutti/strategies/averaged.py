"""Workers with private weights and no centre; their average is the result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.sharded import ShardedOptimizer
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Pace, Strategy, WeightPlacement
from tutti.strategies.inside import GroupedStrategy
from tutti.strategies.own_weights import OwnWeightsWorker

S = TypeVar("S", bound=Strategy)

MOST_ROWS: Final = 8
"""The most workers that read each other's rows directly. With more, each sums one slice for all."""


class WeightRows:
    """The weights that all workers published last, in memory that all of them see.

    There are two sets, used in turn: a worker that writes to one has passed a barrier which the others
    reached only after reading it. So one barrier per publication is enough.

        rank 0   write row 0 of A ┐         ┌ read A │ write row 0 of B ┐         ┌ read B
        rank 1   write row 1 of A ┴ barrier ┴ read A │ write row 1 of B ┴ barrier ┴ read B     A is next
    """

    def __init__(self, comm: Communicator, vectors: Sequence[Tensor]) -> None:
        self._comm, self._turn = comm, 0
        self._sets = [
            comm.shared(2, comm.size, len(vector), dtype=vector.dtype).unbind() for vector in vectors
        ]

    def publish(self, vectors: Sequence[Tensor], places: Sequence[slice] | None = None) -> list[Tensor]:
        """Publish vectors, or their stretches at `places`; return all ranks' rows until the next call."""
        self._turn ^= 1
        rows = [both[self._turn] for both in self._sets]
        if places is not None:
            rows = [row[:, place] for row, place in zip(rows, places, strict=True)]
        copy_all([row[self._comm.rank] for row in rows], vectors)
        self._comm.barrier()
        return rows


class Average:
    """The mean of vectors over all workers, bit-equal on all of them."""

    def __init__(self, comm: Communicator, vectors: Sequence[Tensor]) -> None:
        self._comm = comm
        close = comm.hosts == 1 and 1 < comm.size <= MOST_ROWS
        self.rows = WeightRows(comm, vectors) if close else None  # if workers read each other's

    @torch.no_grad()
    def take(self, vectors: Sequence[Tensor], places: Sequence[slice] | None = None) -> int:
        """Overwrite vectors, or stretches at `places`, with the mean; return the bytes sent (collective)."""
        if self._comm.size == 1:
            return 0
        if self.rows is not None:
            for vector, rows in zip(vectors, self.rows.publish(vectors, places), strict=True):
                mean(vector, rows.unbind())
        else:
            for vector in vectors:
                self._comm.all_reduce(vector)
                vector.div_(self._comm.size)
        return sum(vector.nbytes for vector in vectors)


class PeerStrategy(GroupedStrategy):
    """A strategy without a centre, whose workers exchange something in every `every`-th step."""

    home: ClassVar[WeightPlacement] = WeightPlacement.PRIVATE
    pace: ClassVar[Pace] = Pace.ABREAST
    joint_norm: ClassVar[bool] = True

    every: int

    @property
    @override
    def period(self) -> int:
        return self.every


class PeerWorker(OwnWeightsWorker, Generic[S]):
    """A worker that exchanges something with others in each `period`-th step."""

    def __init__(
        self, strategy: S, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(replica, ShardedOptimizer(optimizer, replica), clip)
        self.strategy, self.comm, self._met_at = strategy, comm, comm.clock()
        self.rounds = 0  # steps made or skipped

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        self.skip()

    @override
    @torch.no_grad()
    def skip(self) -> None:
        """Take part in the exchange that may follow a step."""
        self.rounds += 1
        if self.rounds % self.strategy.period == 0:
            self.meet(self.exchange)

    @abstractmethod
    def exchange(self, vectors: list[Tensor]) -> int:
        """Exchange the weights `vectors`, and overwrite them; returns the bytes sent (collective)."""

    def meet(self, exchange: Callable[[list[Tensor]], int]) -> None:
        """Make and count an exchange of the weights; `exchange` returns the bytes sent."""
        began = self.comm.clock()
        sent = exchange(self.weights)
        now = self.comm.clock()
        self.traffic.add(sent, now - began, 0, now - self._met_at)
        self._met_at = now

    @override
    def state(self) -> State:
        state = super().state()
        state.shared["rounds"] = self.rounds
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        self.rounds = saved.shared["rounds"]


class AveragedWorker(PeerWorker[S]):
    """A worker that steps on its own weights; the average of all workers is evaluated and kept."""

    def __init__(
        self, strategy: S, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self.average = Average(comm, self.weights)

    @override
    def exchange(self, vectors: list[Tensor]) -> int:
        return self.average.take(vectors)

    @override
    def agree(self) -> None:
        self.average.take(self.weights)


def mean(out: Tensor, vectors: Sequence[Tensor]) -> None:
    """Overwrite `out` with the mean of the vectors, added up in their order.

        x = 1/n (x_1 + x_2 + ... + x_n)

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, algorithm 1.

    With a worker and its neighbours, in a regular graph, this is the mixing of Lian et al.
    2017, arXiv:1705.09056, algorithm 1: x_i = sum over j of W_ij x_j, with W_ij = 1/n.

    `out` may be the first of the vectors. 16-bit numbers are added up in float32 and rounded once.
    """
    narrow = out.is_floating_point() and out.itemsize < 4
    first, *others = vectors
    if narrow or not others:
        total = first.float() if narrow else out.copy_(first)
    else:
        total = torch.add(first, others.pop(0), out=out)
    for vector in others:
        total.add_(vector)
    torch.div(total, len(vectors), out=total)
    if narrow:
        out.copy_(total)
