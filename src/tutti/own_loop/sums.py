"""Recognise a loss that is a sum over the samples, from the last nodes of its graph.

A loss function with reduction="sum", or a sum over the samples, is one; so it is if it is negated, scaled, or
beside other terms. What is divided by the number of samples on the way is taken for a mean.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

SUM: Final = 2
"""The number of reduction="sum" in torch's loss functions."""

_ROUNDING: Final = 1e-6

LINEAR: Final = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Rsub", "Neg", "ToCopy", "Squeeze", "Unsqueeze", "View", "Clone", "Alias"),
        *("Stack", "Sum"),
    )
    for number in (0, 1)
)
"""Nodes through which a sum over samples stays one."""


def is_sum(root: Any, own: int) -> bool:
    """Return whether a loss is seen to be a sum over a rank's samples.

    Args:
        root: the loss's node.
        own: how many samples the rank has.
    """
    left, seen = [root], set[Any]()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        name, sizes = node.name(), _summed(node)
        is_of_torch = getattr(node, "_saved_reduction", None) == SUM
        is_over_samples = is_of_torch or own in sizes.values() or (0 in sizes and sizes[0] % own == 0)
        if is_over_samples and _is_of_batch(node, own):
            return True
        is_scaled = name.startswith("Mul") and len(_below(node)) == 1 and not _divides(node, own)
        if name in LINEAR or is_scaled:
            left += _below(node)
    return False


def _below(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _summed(node: Any) -> dict[int, int]:
    """Return the sizes of the dimensions that a node sums over."""
    if getattr(node, "_saved_reduction", None) == SUM:
        return dict(enumerate(node._saved_self.shape))
    if not node.name().startswith("Sum"):
        return {}
    sizes = node._saved_self_sym_sizes
    dims = getattr(node, "_saved_dim", None) or range(len(sizes))
    # Torch keeps -1 as 2^64 - 1.
    return {dim: sizes[dim] for dim in ((dim - 2**64 if dim >= 2**63 else dim) % len(sizes) for dim in dims)}


def _is_of_batch(node: Any, own: int) -> bool:
    """Return whether several parameters are below, and no division; a penalty has one of them."""
    ends, left, seen = 0, _below(node), set[Any]()
    while left and ends < 2:
        one = left.pop()
        if one in seen or _divides(one, own):
            continue
        seen.add(one)
        left += _below(one)
        ends += hasattr(one, "variable")
    return ends > 1


def _divides(node: Any, own: int) -> bool:
    """Return whether a node may divide by the number of samples, also as it multiplies by weights."""
    is_quotient = bool(node.name().startswith("Div"))
    if not is_quotient and not node.name().startswith("Mul"):
        return False
    if len(_below(node)) > 1 or (is_quotient and node.next_functions[0][0] is None):
        return is_quotient
    found = node._saved_other if node.next_functions[0][0] is not None else node._saved_self
    if not isinstance(found, Tensor):
        found = torch.tensor(0.0 if found is None else found)
    factors = found.detach().double().abs()
    if is_quotient:
        factors = factors.reciprocal()
    # Weights of the samples that add up to 1, or one factor for all of them.
    return bool(factors.sum() * (own if factors.numel() == 1 else 1) <= 1 + _ROUNDING)
