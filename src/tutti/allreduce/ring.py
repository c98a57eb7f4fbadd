"""All-reduce on a ring: every rank sends to the next one only."""

from __future__ import annotations

from torch import Tensor

from tutti.allreduce.ranks import Ranks
from tutti.comm.base import cut
from tutti.registry import part


@part("ring")
def all_reduce(comm: Ranks, vector: Tensor) -> None:
    """Sum `vector` over the ranks on a ring, in place: with the fewest bytes.

        rank 0  a0 b0 c0      c0 ->  1      b0+b2 ->  1     Rank r ends with slice r of the sum; the slices
        rank 1  a1 b1 c1      a1 ->  2      c0+c1 ->  2     then go round once more, each to all.
        rank 2  a2 b2 c2      b2 ->  0      a1+a2 ->  0

    2 (p - 1) steps; each rank sends 2 (p - 1)/p of the vector's bytes. One slice is summed on one path, so
    that all ranks get the same bits.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2), section 3.
    """
    reduce_scatter(comm, vector)
    all_gather(comm, vector)


def reduce_scatter(comm: Ranks, vector: Tensor) -> None:
    """Overwrite this rank's slice, `cut(len(vector), size)[rank]`, with the sum; the rest is used up.

    p - 1 steps; each rank sends (p - 1)/p of the bytes.
    """
    slices = cut(len(vector), comm.size)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    incoming = vector.new_empty(slices[0].stop)
    for step in range(1, comm.size):
        passed = slices[(comm.rank - step) % comm.size]
        taken = vector[slices[(comm.rank - step - 1) % comm.size]]
        arrived = incoming[: len(taken)]
        comm.exchange(vector[passed], following, arrived, before)
        comm.add(arrived, taken)


def all_gather(comm: Ranks, vector: Tensor) -> None:
    """Fill in the other ranks' slices; each owns `cut(len(vector), size)[rank]`.

    p - 1 steps; each rank sends (p - 1)/p of the bytes.
    """
    slices = cut(len(vector), comm.size)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        passed = slices[(comm.rank - step) % comm.size]
        taken = slices[(comm.rank - step - 1) % comm.size]
        comm.exchange(vector[passed], following, vector[taken], before)
