"""Adaptive sums (Adasum), pair by pair: the mean of two gradients that agree, the sum of orthogonal ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction
from tutti.allreduce.ranks import Ranks
from tutti.comm.base import Communicator


def combine(first: Tensor, second: Tensor, layers: Sequence[slice]) -> None:
    """Overwrite the first of two gradients with their Adasum, layer by layer.

        Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
                     = a + b - u.v / 2 (|b| u + |a| v)        with u = a / |a|, v = b / |b|

    The second form has no squares of norms, which overflow and underflow. All is computed in float64.

    Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924,
    section 3.
    """
    for layer in layers:
        a, b = first[layer].double(), second[layer].double()
        norm_a, u = _norm_and_direction(a)
        norm_b, v = _norm_and_direction(b)
        half_cosine = torch.dot(u, v) / 2
        first[layer] = a + b - half_cosine * (norm_b * u + norm_a * v)


def _norm_and_direction(vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return |x| and x / |x|; zeros for a vector of zeros."""
    largest = vector.abs().max()
    if largest == 0:
        return largest, vector
    scaled = vector / largest
    norm = scaled.norm()
    return largest * norm, scaled / norm


class Adasum(GradientReduction):
    """Adasum over the ranks by recursive doubling, layer by layer.

        p = 6     0 <- 4, 1 <- 5     the ranks beyond the largest power of two, to a partner below it
                  0 <-> 1, 2 <-> 3   both compute the same Adasum(lower rank's, higher rank's)
                  0 <-> 2, 1 <-> 3
                  0 -> 4, 1 -> 5

    ⌊log2 p⌋ steps of one whole vector each, and two more where p is no power of two. Adasum wants the mean
    over each worker's own samples, so a gradient is divided by the share that it was weighted by. A worker
    without samples has a gradient of zero, which leaves the others' as they are.

    Horovod, the authors' program, takes only powers of two; here each surplus worker is first combined with a
    partner. It combines the moves of each worker's optimizer; here gradients are combined, before the one
    optimizer, which is the same with plain SGD.

    Source: Maleki et al. 2020 (see `tutti.allreduce.adasum`), section 3.
    """

    def __init__(self, comm: Communicator, layout: GradientLayout) -> None:
        self._comm, self._wide = comm, layout.wide
        self._layers = [layer.place for layer in layout.layers]

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        comm, wide = Ranks(self._comm), vector.to(self._wide)
        if share:
            wide = wide / share
        power = 1 << (comm.size.bit_length() - 1)
        partner = comm.rank ^ power
        if comm.rank >= power:
            comm.send(wide, partner)
            comm.recv(wide, partner)
        else:
            received = wide.new_empty(len(wide))
            if partner < comm.size:
                comm.recv(received, partner)
                combine(wide, received, self._layers)
            self._double(comm, wide, received, power)
            if partner < comm.size:
                comm.send(wide, partner)
        if wide is not vector:
            vector.copy_(wide)
        return comm.sent.nbytes

    def _double(self, comm: Ranks, wide: Tensor, received: Tensor, power: int) -> None:
        """Form the Adasum over the ranks below `power`, a power of two."""
        distance = 1
        while distance < power:
            other = comm.rank ^ distance
            comm.exchange(wide, other, received, other)
            if comm.rank < other:
                combine(wide, received, self._layers)
            else:  # in the same order as the other does it, for the same bits
                combine(received, wide, self._layers)
                wide.copy_(received)
            distance *= 2
