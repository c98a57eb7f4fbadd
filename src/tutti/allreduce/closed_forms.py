"""Closed forms of the sums that users choose by name, on any network: seconds until all ranks have the sum.

The symbols are those of `tutti.comm.network`. Each takes a network, the number of ranks on each host, and the
bytes of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tutti.allreduce.torus import width
from tutti.comm.network import Network, distances
from tutti.comm.rounds import Branches, Pairs, Rings, ring_s, round_s

Hosts = Sequence[int]


def ring_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 (p - 1) α + 2 (p - 1)/p nβ + (p - 1)/p nγ (Patarasuk, Yuan 2009, section 3)."""
    ranks = sum(hosts)
    steps = ring_s(network.ranks(hosts), Rings(ranks), ranks, nbytes / ranks, 2 * (ranks - 1))
    return steps + (ranks - 1) / ranks * nbytes * network.adding_s_per_byte


def tree_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 ⌊log2 p⌋ α + 2 ⌈log2 p⌉ nβ + ⌈log2 p⌉ nγ (TRG sections 4.2 and 4.5)."""
    ranks, fabric = sum(hosts), network.ranks(hosts)
    levels = [Branches(distance) for distance in distances(ranks)]
    one_way = sum(round_s(fabric, level, ranks, nbytes) for level in levels)
    if ranks & (ranks - 1):  # no power of two: the longest branch has a level less than the root
        one_way -= min(round_s(fabric, level, ranks, 0) for level in levels)
    return 2 * one_way + len(levels) * nbytes * network.adding_s_per_byte


def halving_doubling_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 log2 p α + 2 (p - 1)/p nβ + (p - 1)/p nγ (TRG section 4.5).

    Unless p is a power of two, this is of the largest one below p, and 2α + 5/2 nβ + nγ come on top: a rank
    gets a whole vector and another one's first half at the same time, and sends the whole sum back.
    """
    ranks, fabric = sum(hosts), network.ranks(hosts)
    power = 1 << (ranks.bit_length() - 1)
    beyond = sum(round_s(fabric, Pairs(power), ranks, part * nbytes) for part in (1, 1.5))
    halves = (round_s(fabric, Pairs(far), power, nbytes * far / power) for far in distances(power))
    added = (power - 1) / power + (ranks > power)
    return beyond + 2 * sum(halves) + added * nbytes * network.adding_s_per_byte


def torus_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 (x + y - 2) α + 2 (p - 1)/p nβ + (p - 1)/p nγ: rows of x, columns of y (Mikami et al. 2018)."""
    ranks, fabric = sum(hosts), network.ranks(hosts)
    across = width(ranks, len(hosts))
    down = ranks // across
    rows = ring_s(fabric, Rings(across), ranks, nbytes / across, 2 * (across - 1))
    columns = ring_s(fabric, Rings(down, across), ranks, nbytes / ranks, 2 * (down - 1))
    return rows + columns + (ranks - 1) / ranks * nbytes * network.adding_s_per_byte


def hierarchical_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """(3 k - 2) α + 4 (k - 1)/k nβ in each host of k ranks, and a ring between hosts (Jia et al. 2018)."""
    most, local = max(hosts), network.local
    inside = ring_s(local, Rings(most), most, nbytes / most, 3 * (most - 1))
    scatter = local.message_s((most - 1) / most * nbytes) if most > 1 else 0.0
    between = ring_all_reduce_s(network, (1,) * len(hosts), nbytes)
    return inside + scatter + between + (most - 1) / most * nbytes * network.adding_s_per_byte


def adasum_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """⌊log2 p⌋ (α + nβ), and α + 2 nβ or 2 (α + nβ) unless p is a power of two (Maleki et al. 2020).

    The ranks beyond that power send while others exchange, if at most every third rank is beyond it. If p is
    odd, a rank gets two vectors at once: nβ more.
    """
    ranks, fabric = sum(hosts), network.ranks(hosts)
    power = 1 << (ranks.bit_length() - 1)
    beyond = sum(round_s(fabric, Pairs(power), ranks, part * nbytes) for part in (1, 1 + ranks % 2))
    if 3 * (ranks - power) <= ranks:
        beyond -= round_s(fabric, Pairs(power), ranks, 0)
    return beyond + sum(round_s(fabric, Pairs(far), power, nbytes) for far in distances(power))


CLOSED_FORMS: Final[dict[str, Callable[[Network, Hosts, float], float]]] = {
    "native": Network.all_reduce_s,
    "ring": ring_all_reduce_s,
    "tree": tree_all_reduce_s,
    "halving_doubling": halving_doubling_all_reduce_s,
    "torus": torus_all_reduce_s,
    "hierarchical": hierarchical_all_reduce_s,
    "adasum": adasum_s,
}
"""The closed form of each sum, by the names of `sync`'s options `collective` and `reduce`."""
