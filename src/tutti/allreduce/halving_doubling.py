"""All-reduce by recursive halving and doubling."""

from __future__ import annotations

from torch import Tensor

from tutti.allreduce.ranks import Ranks
from tutti.comm.base import cut
from tutti.registry import part


@part("halving_doubling")
def all_reduce(comm: Ranks, vector: Tensor) -> None:
    """Sum `vector` over the ranks by recursive halving and doubling, in place: few steps and few bytes.

        distance 4   0123 <-> 4567   each sends the half that the other keeps, and adds what it gets
        distance 2   01 <-> 23       each sends a quarter
        distance 1   0 <-> 1         each sends an eighth, and owns an eighth of the sum
        then back: distances 1, 2, 4, sending what it has: an eighth, a quarter, a half

    With p a power of two: 2 log2 p steps; each rank sends 2 (p - 1)/p of the vector's bytes. With any other
    p, the ranks beyond the largest power of two first send their whole vector to a partner below it and get
    the whole sum at the end: 2 steps more for the partner, and one vector's bytes.

    Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
    International Journal of High Performance Computing Applications 19(1), section 4.5.
    """
    power = 1 << (comm.size.bit_length() - 1)
    beyond = comm.size - power
    if comm.rank >= power:
        comm.send(vector, comm.rank - power)
        comm.recv(vector, comm.rank - power)
        return
    if comm.rank < beyond:
        incoming = vector.new_empty(len(vector))
        comm.recv(incoming, comm.rank + power)
        comm.add(incoming, vector)
    _halve_and_double(comm.subset(range(power)), vector)
    if comm.rank < beyond:
        comm.send(vector, comm.rank + power)


def _halve_and_double(comm: Ranks, vector: Tensor) -> None:
    """Sum over a number of ranks that is a power of two."""
    edges = [0, *(part.stop for part in cut(len(vector), comm.size))]
    incoming = vector.new_empty(len(vector))
    first, distance = 0, comm.size // 2  # this rank has the sum of slices first to first + 2 * distance - 1
    while distance:
        middle = first + distance
        low, high = slice(edges[first], edges[middle]), slice(edges[middle], edges[middle + distance])
        upper = bool(comm.rank & distance)
        kept, given = (high, low) if upper else (low, high)
        arrived = incoming[: kept.stop - kept.start]
        comm.exchange(vector[given], comm.rank ^ distance, arrived, comm.rank ^ distance)
        comm.add(arrived, vector[kept])
        first += distance * upper
        distance //= 2
    distance = 1
    while distance < comm.size:
        first, theirs = comm.rank // distance * distance, (comm.rank ^ distance) // distance * distance
        own = vector[edges[first] : edges[first + distance]]
        wanted = vector[edges[theirs] : edges[theirs + distance]]
        comm.exchange(own, comm.rank ^ distance, wanted, comm.rank ^ distance)
        distance *= 2
