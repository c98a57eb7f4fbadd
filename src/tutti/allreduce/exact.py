"""Exact sums: by the communicator itself, or by an algorithm that is chosen by name."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction
from tutti.allreduce.ranks import AllReduce, Ranks
from tutti.comm.base import Communicator


class Native(GradientReduction):
    """Sums by the communicator's own all-reduce: the host's shared memory, MPI's between hosts."""

    def __init__(self, comm: Communicator, layout: GradientLayout) -> None:
        self._comm = comm

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        self._comm.all_reduce(vector)
        return all_reduce_bytes(vector.nbytes, self._comm.size)


class ByMessages(GradientReduction):
    """Sums by one of `tutti.allreduce.ALGORITHMS`; 16-bit numbers travel and are added as float32."""

    def __init__(self, comm: Communicator, layout: GradientLayout, algorithm: AllReduce) -> None:
        self._comm, self._wide, self._algorithm = comm, layout.wide, algorithm

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        ranks, wide = Ranks(self._comm), vector.to(self._wide)
        self._algorithm(ranks, wide)
        if wide is not vector:
            vector.copy_(wide)
        return ranks.sent.nbytes


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Return the least that each of p ranks sends in an all-reduce of `nbytes`: 2 (p - 1)/p of them."""
    return 2 * (size - 1) * nbytes // size
