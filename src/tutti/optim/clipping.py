"""Gradient clipping over flat vectors; the same as torch's over the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tutti.replica import Gradients, squared_norm, two_norm

STEADY = 1e-6
"""Added to the norm before the division, as `torch.nn.utils.clip_grad_norm_` does."""


def scale_for(norm: float, most: float) -> float:
    """Return the factor that limits a gradient's 2-norm to `most`, at most 1.

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


def clip_gradients(gradients: Gradients, norm: float | None, value: float | None) -> None:
    """Limit a replica's gradients like `clip`; the norm is the whole model's (collective over its team)."""
    if norm is None or gradients.share is None:
        clip(gradients.vectors(), norm, value)
        return
    clip(gradients.vectors(), None, value)
    scale = scale_for(math.sqrt(gradients.squared_norm()), norm)
    if scale != 1:
        gradients.scale(scale)


def scale_there(gradients: Sequence[Tensor], most: float) -> Tensor:
    """Return the factor of clipping as a scalar on the gradients' device, without waiting for a GPU."""
    norms = [two_norm(gradient) for gradient in gradients]
    scale: Tensor = most / (torch.linalg.vector_norm(torch.stack(norms)) + STEADY)
    return scale.clamp(max=1.0)
