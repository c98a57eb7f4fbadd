"""Closed forms of the sums that users choose by name, on any network: seconds until all ranks have the sum.

The symbols are those of `tutti.comm.closed_forms`; k is the number of ranks on a host, h the number of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tutti.allreduce.torus import width
from tutti.comm.closed_forms import Branches, Pairs, Rings, distances, ring_s, round_s
from tutti.comm.network import Network

Hosts = Sequence[int]
"""The number of ranks on each host."""


def ring_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 (p - 1) α + 2 (p - 1)/p nβ + (p - 1)/p nγ (Patarasuk, Yuan 2009, section 3)."""
    ranks = sum(hosts)
    steps = ring_s(network.ranks(hosts), Rings(ranks), ranks, nbytes / ranks, 2 * (ranks - 1))
    return steps + (ranks - 1) / ranks * nbytes * network.adding_s_per_byte


def tree_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 ⌊log2 p⌋ α + 2 ⌈log2 p⌉ nβ + ⌈log2 p⌉ nγ (TRG sections 4.2 and 4.5)."""
    ranks, fabric = sum(hosts), network.ranks(hosts)
    branches = [Branches(distance) for distance in distances(ranks)]
    one_way = sum(round_s(fabric, branch, ranks, nbytes) for branch in branches)
    if ranks & (ranks - 1):  # the longest way has one branch less than the root
        one_way -= min(round_s(fabric, branch, ranks, 0) for branch in branches)
    return 2 * one_way + len(branches) * nbytes * network.adding_s_per_byte


def halving_doubling_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 log2 p α + 2 (p - 1)/p nβ + (p - 1)/p nγ (TRG section 4.5).

    Unless p is a power of two, this is of the largest one below p, and 2α + 5/2 nβ + nγ come on top: ranks
    below it get a whole vector, while another one sends them half of its own, and send the sum back.
    """
    ranks, fabric, adding = sum(hosts), network.ranks(hosts), network.adding_s_per_byte
    power = 1 << (ranks.bit_length() - 1)
    beyond = round_s(fabric, Pairs(power), ranks, nbytes) + round_s(fabric, Pairs(power), ranks, 1.5 * nbytes)
    halves = sum(
        2 * round_s(fabric, Pairs(distance), power, nbytes * distance / power)
        for distance in distances(power)
    )
    return beyond + halves + ((power - 1) / power + (ranks > power)) * nbytes * adding


def torus_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """2 (x + y - 2) α + 2 (p - 1)/p nβ + (p - 1)/p nγ: rows of x, columns of y (Mikami et al. 2018)."""
    ranks, fabric = sum(hosts), network.ranks(hosts)
    across = width(ranks, len(hosts))
    down = ranks // across
    rows = ring_s(fabric, Rings(across), ranks, nbytes / across, 2 * (across - 1))
    columns = ring_s(fabric, Rings(down, across), ranks, nbytes / ranks, 2 * (down - 1))
    return rows + columns + (ranks - 1) / ranks * nbytes * network.adding_s_per_byte


def hierarchical_all_reduce_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """(3 k - 2) α + 4 (k - 1)/k nβ inside the hosts, and a ring between them (Jia et al. 2018)."""
    most, count, local = max(hosts), len(hosts), network.local
    inside = ring_s(local, Rings(most), most, nbytes / most, 3 * (most - 1))
    scatter = local.start_s + local.transfer_s((most - 1) / most * nbytes) if most > 1 else 0.0
    between = ring_s(network.between(count), Rings(count), count, nbytes / count, 2 * (count - 1))
    added = (most - 1) / most + (count - 1) / count
    return inside + scatter + between + added * nbytes * network.adding_s_per_byte


def adasum_s(network: Network, hosts: Hosts, nbytes: float) -> float:
    """⌊log2 p⌋ (α + nβ), and unless p is a power of two, 2 (α + nβ) (Maleki et al. 2020, section 3).

    Where at most every third rank is beyond that power, the first α passes while the others exchange.
    """
    ranks, fabric = sum(hosts), network.ranks(hosts)
    power = 1 << (ranks.bit_length() - 1)
    beyond = 2 * round_s(fabric, Pairs(power), ranks, nbytes)
    if 3 * (ranks - power) <= ranks:
        beyond -= round_s(fabric, Pairs(power), ranks, 0)
    return beyond + sum(round_s(fabric, Pairs(distance), power, nbytes) for distance in distances(power))


CLOSED_FORMS: Final[dict[str, Callable[[Network, Hosts, float], float]]] = {
    "native": Network.all_reduce_s,
    "ring": ring_all_reduce_s,
    "tree": tree_all_reduce_s,
    "halving_doubling": halving_doubling_all_reduce_s,
    "torus": torus_all_reduce_s,
    "hierarchical": hierarchical_all_reduce_s,
    "adasum": adasum_s,
}
"""The seconds of each sum, by the names of `sync`'s options `collective` and `reduce`."""
