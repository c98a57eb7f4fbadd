"""Adaptive sums (Adasum), pair by pair."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from tutti.algorithms import Counted
from tutti.algorithms.base import TAG
from tutti.comm.base import Communicator
from tutti.reduction.base import Layout, Reduction
from tutti.rules.adasum import combine


class Adaptive(Reduction):
    """Adasum over the ranks by recursive doubling, for each layer by itself.

        p = 6     0 <- 4, 1 <- 5     the ranks beyond the largest power of two, to a partner below it
                  0 <-> 1, 2 <-> 3   both compute the same Adasum(lower rank's, higher rank's)
                  0 <-> 2, 1 <-> 3
                  0 -> 4, 1 -> 5

    ⌊log2 p⌋ steps of one whole vector each, and two more where p is no power of two. Each worker's gradient
    is weighted by its share of the samples, and Adasum wants the mean over the worker's own: so it is divided
    by that share. A worker without samples has a gradient of zero, which leaves the others' as they are.

    Horovod, the authors' program, takes powers of two alone; here the surplus workers are first combined with
    a partner each. It combines the moves that each worker's own optimizer has made; here gradients are
    combined, before the one optimizer, which is the same with plain SGD.

    Source: Maleki et al. 2020 (see `tutti.rules.adasum`), section 3.

    Args:
        comm: the ranks.
        layout: of the vector.
    """

    def __init__(self, comm: Communicator, layout: Layout) -> None:
        self._comm, self._wide = comm, layout.wide
        self._layers = [layer.place for layer in layout.layers]

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        comm, wide = Counted(self._comm), vector.to(self._wide)
        if share:
            wide = wide / share
        power = 1 << (comm.size.bit_length() - 1)
        partner = comm.rank ^ power
        if comm.rank >= power:
            comm.send(wide, partner, TAG)
            comm.recv(wide, partner, TAG)
        else:
            received = wide.new_empty(len(wide))
            if partner < comm.size:
                comm.recv(received, partner, TAG)
                combine(wide, received, self._layers)
            self._double(comm, wide, received, power)
            if partner < comm.size:
                comm.send(wide, partner, TAG)
        if wide is not vector:
            vector.copy_(wide)
        return comm.sent.nbytes

    def _double(self, comm: Counted, wide: Tensor, received: Tensor, power: int) -> None:
        """Adasum over the ranks below `power`, a power of two."""
        distance = 1
        while distance < power:
            other = comm.rank ^ distance
            comm.exchange(wide, other, received, other, TAG)
            if comm.rank < other:
                combine(wide, received, self._layers)
            else:  # in the same order as the other does it, for the same bits
                combine(received, wide, self._layers)
                wide.copy_(received)
            distance *= 2
