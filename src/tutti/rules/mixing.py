"""Averages of workers' weights: of all, of neighbours in a graph, of pairs; and a step towards an average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRAPHS = ("ring", "exponential", "all", "shift_one")
"""Graphs of workers that average: see `links`."""


def mean(out: Tensor, vectors: Sequence[Tensor]) -> None:
    """Overwrite `out` with the mean of the vectors, added up in their order.

        x = 1/n (x_1 + x_2 + ... + x_n)

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, algorithm 1.
    With a worker and its neighbours, in a graph where all have as many, this is the mixing of Lian et al.
    2017, arXiv:1705.09056, algorithm 1: x_i = sum over j of W_ij x_j, with W_ij = 1/n.

    Args:
        out: may be the first of `vectors`, and none of the others.
        vectors: at least one, of the shape and dtype of `out`. Those of 16-bit numbers are added up in
            float32 and rounded once.
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


def move_outer(anchor: Tensor, average: Tensor, velocity: Tensor, lr: float, momentum: float) -> None:
    """One step of the outer optimizer, SGD with Nesterov's momentum, from an anchor towards an average.

        d = anchor - average             what the workers have done since the anchor, as a gradient
        v = momentum v + d
        anchor = anchor - lr (d + momentum v)

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, algorithm 1, lines 12 and 14, with the outer optimizer of section 2.

    Args:
        anchor: where the workers began; overwritten.
        average: the mean of where they are now; overwritten.
        velocity: v, zeros at first; overwritten.
        lr: of the outer optimizer.
        momentum: of the outer optimizer; 0: plain SGD, which with lr 1 ends at the average.
    """
    delta = torch.sub(anchor, average, out=average)
    velocity.mul_(momentum).add_(delta)
    anchor.sub_(delta, alpha=lr).sub_(velocity, alpha=lr * momentum)


def half_way(mine: Tensor, theirs: Tensor) -> None:
    """Overwrite `theirs` with the step that takes a worker half-way to another, which subtracts it.

        d = (x_j - x_i) / 2          x_i = x_i + d          x_j = x_j - d

    Both are then at (x_i + x_j) / 2, and their sum is what it was, even if d arrives later.

    Source: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    arXiv:1710.06952, algorithm 1, step 4.

    Args:
        mine: x_i.
        theirs: x_j; overwritten with d.
    """
    theirs.sub_(mine).div_(2)


def links(graph: str, rank: int, size: int, step: int) -> list[tuple[int, int]]:
    """Return the ranks that a rank sends its weights to and gets weights from, in turn, when it mixes.

    Each averages with weight 1 / (1 + number of its links). The mixing matrix is doubly stochastic in every
    step: each graph is a circle on which all look alike, or consists of pairs.

    Args:
        graph: "ring": both neighbours. "exponential": those 1, 2, 4, ... places on (Assran et al. 2019,
            arXiv:1811.10792, section 3). "all": everyone. "shift_one": one other, another one in each step;
            the two of a pair exchange. With an odd number of ranks one of them rests.
        rank: 0 to size - 1.
        size: how many ranks there are.
        step: how many times they have mixed before.

    Returns:
        Pairs of ranks (to, source). In each turn all ranks that are in it have one.
    """
    if graph == "shift_one":
        partner = _partner(rank, size, step)
        return [] if partner is None else [(partner, partner)]
    if graph == "ring":
        hops = [1, -1] if size > 2 else [1]
    elif graph == "exponential":
        hops = [1 << power for power in range((size - 1).bit_length())]
    else:
        hops = list(range(1, size))
    return [((rank + hop) % size, (rank - hop) % size) for hop in hops] if size > 1 else []


def _partner(rank: int, size: int, step: int) -> int | None:
    """Return the other of a pair; the first half's k-th rank meets the second half's (k + step)-th."""
    half = (size + 1) // 2
    if rank >= half:
        return (rank - half - step) % half
    other = half + (rank + step) % half
    return other if other < size else None
