"""Adaptive summation of two gradients: the mean where they agree, the sum where they are orthogonal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def coefficients(dot: float, first_square: float, second_square: float) -> tuple[float, float]:
    """What to multiply two gradients by before they are added.

        Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

    Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924,
    section 3.

    Args:
        dot: a.b
        first_square: |a|^2
        second_square: |b|^2

    Returns:
        The coefficients of a and b; 1 for a gradient that is zero.
    """
    first = 1 - dot / (2 * first_square) if first_square else 1.0
    second = 1 - dot / (2 * second_square) if second_square else 1.0
    return first, second


def combine(first: Tensor, second: Tensor, layers: Sequence[slice]) -> None:
    """Adasum of two gradients, for each layer by itself, in place of the first.

    Dot products are formed in float64: a gradient's square soon leaves the range of 16-bit numbers.

    Args:
        first: a gradient, one vector.
        second: another, of the same length and dtype.
        layers: where each layer's parameters lie; what lies in none of them is left as it was.
    """
    for layer in layers:
        a, b = first[layer], second[layer]
        wide_a, wide_b = a.double(), b.double()
        dots = torch.dot(wide_a, wide_b), torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
        of_a, of_b = coefficients(*(float(dot) for dot in dots))
        a.mul_(of_a).add_(b, alpha=of_b)
