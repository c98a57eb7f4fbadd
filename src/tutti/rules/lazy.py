"""The rule for sending a gradient only if it has changed enough.

Chen, Giannakis, Sun, Yin 2018, "LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed
Learning", arXiv:1805.09965.
"""

from __future__ import annotations

from collections.abc import Iterable


def is_worth_sending(
    change: float, moves: Iterable[float], *, threshold: float, lr: float, workers: int
) -> bool:
    """Tell whether a worker should send its new gradient, or let the centre use its last one again.

        send, unless  |g_new - g_sent|^2  <=  1 / (eta M)^2  *  sum over d of  xi * |w_(k+1-d) - w_(k-d)|^2

    Source: condition 15a (LAG-WK), with all weights xi_d equal. The right side estimates the square of the
    whole gradient by how far the weights went lately: less change than that, and a stale gradient does no
    harm.

    Args:
        change: |g_new - g_sent|^2.
        moves: |w_(k+1-d) - w_(k-d)|^2 for d = 1 .. D, the squares of the latest moves of the weights.
        threshold: xi; 0 sends every gradient that has changed at all.
        lr: eta, the step size of the centre.
        workers: M.
    """
    # The rate may be 0, as in a schedule: then no gradient moves anything, and none is worth sending.
    return change * (lr * workers) ** 2 > threshold * sum(moves)
