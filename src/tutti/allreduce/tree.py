"""All-reduce along a tree: to the root, and back."""

from __future__ import annotations

from torch import Tensor

from tutti.allreduce.ranks import Ranks
from tutti.registry import part


@part("tree")
def all_reduce(comm: Ranks, vector: Tensor) -> None:
    """Sum `vector` along a binomial tree to rank 0 and send the sum back along it, in place.

        step 1   0 <- 1   2 <- 3   4 <- 5   6 <- 7        step 6   0 -> 1   2 -> 3   4 -> 5   6 -> 7
        step 2   0 <- 2            4 <- 6                 step 5   0 -> 2            4 -> 6
        step 3   0 <- 4                                   step 4   0 -> 4

    At most 2 ⌈log2 p⌉ steps on each rank; every step carries the whole vector, so that the ranks together
    send 2 (p - 1) vectors. Good for short vectors, where only latency counts.

    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
    International Journal of High Performance Computing Applications 19(1), sections 4.2
    (broadcast) and 4.5 (reduce).
    """
    incoming = vector.new_empty(len(vector))
    distance = 1
    while distance < comm.size and not comm.rank & distance:
        if comm.rank + distance < comm.size:
            comm.recv(incoming, comm.rank + distance)
            comm.add(incoming, vector)
        distance *= 2
    # A rank other than 0 has now found its parent, `distance` below it; its children are nearer.
    if comm.rank:
        comm.send(vector, comm.rank - distance)
        comm.recv(vector, comm.rank - distance)
    while distance > 1:
        distance //= 2
        if comm.rank + distance < comm.size:
            comm.send(vector, comm.rank + distance)
