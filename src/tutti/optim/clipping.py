"""Gradient clipping over flat vectors; the same as torch's over the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

STEADY = 1e-6
"""Added to the norm before the division, as `torch.nn.utils.clip_grad_norm_` does."""


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Return the sum of the squares of all elements, in float64."""
    norms = [float(_norm(gradient)) for gradient in gradients]
    return sum(norm * norm for norm in norms)


def scale_for(norm: float, most: float) -> float:
    """Return the factor that limits a gradient's 2-norm to `most`; 1 when it is no longer than that.

    Pascanu, Mikolov, Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    scale = most / (norm + STEADY)
    return 1.0 if scale >= 1 else scale  # NaN stays NaN, as with torch


def clip_values(gradients: Iterable[Tensor], most: float) -> None:
    """Limit every element to -most .. most, in place."""
    for gradient in gradients:
        gradient.clamp_(-most, most)


def clip(gradients: Sequence[Tensor], norm: float | None, value: float | None) -> None:
    """Limit each element by `value`, then all together by `norm`, in place; None: no limit."""
    if value is not None:
        clip_values(gradients, value)
    if norm is None:
        return
    here = all(gradient.is_cpu for gradient in gradients)
    scale = scale_for(math.sqrt(squared_norm(gradients)), norm) if here else scale_there(gradients, norm)
    if not here or scale != 1:
        for gradient in gradients:
            gradient.mul_(scale)


def scale_there(gradients: Sequence[Tensor], most: float) -> Tensor:
    """Return the factor of clipping as a scalar on the gradients' device, so that nobody waits for a GPU."""
    norms = [_norm(gradient) for gradient in gradients]
    scale: Tensor = most / (torch.linalg.vector_norm(torch.stack(norms)) + STEADY)
    return scale.clamp(max=1.0)


def _norm(gradient: Tensor) -> Tensor:
    """Return the 2-norm in float64, a scalar."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.float64)
    return norm
