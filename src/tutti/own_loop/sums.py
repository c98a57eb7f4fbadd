"""Recognise a loss that is a sum over the samples, from the last nodes of its graph.

    cross_entropy(out, targets, reduction="sum")     (out - targets).square().sum() + penalty

A sum that is multiplied or divided by something is taken for a mean.
"""

from __future__ import annotations

from typing import Any, Final

SUM: Final = 2
"""The number of reduction="sum" in torch's loss functions."""

TERMS: Final = ("AddBackward0", "SubBackward0", "NegBackward0")
"""Nodes whose inputs are the terms of a loss."""


def is_sum(root: Any, own: int) -> bool:
    """Return whether the loss with this node is recognisably a sum over a rank's `own` samples."""
    nodes = [root]
    for node in nodes:  # grows
        if getattr(node, "_saved_reduction", None) == SUM or _sums_samples(node, own):
            return True
        if node.name() in TERMS:
            nodes += [one for one, _ in node.next_functions if one is not None]
    return False


def _sums_samples(node: Any, own: int) -> bool:
    """Return whether a node sums over a dimension of samples, or over all elements of as many rows."""
    if not node.name().startswith("Sum"):
        return False
    sizes = node._saved_self_sym_sizes
    # Torch keeps -1 as 2^64 - 1.
    dims = [
        (dim - 2**64 if dim >= 2**63 else dim) % len(sizes)
        for dim in getattr(node, "_saved_dim", None) or range(len(sizes))
    ]
    return any(sizes[dim] == own or (dim == 0 and sizes[dim] % own == 0) for dim in dims)
