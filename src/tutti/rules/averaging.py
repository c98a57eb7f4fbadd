"""The mean over samples as a sum: each worker's gradient has been weighted by its share of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def add_up(total: Tensor, others: Iterable[Tensor]) -> None:
    """Add the others to `total`, in place and in their order; they are zero afterwards.

        g = g_0 + g_1 + g_2 + ...

    With g_i = (n_i / n) * mean gradient of worker i's n_i samples, the sum is the mean over all n samples.

    Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

    Args:
        total: one worker's gradient; becomes the sum.
        others: the other workers' gradients, of the same shape.
    """
    for other in others:
        total.add_(other)
        other.zero_()
