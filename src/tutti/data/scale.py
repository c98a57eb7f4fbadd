"""The scale of inputs, and the units of targets, from the training samples.

The scale of 8-bit inputs is exact, in any order of the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from tutti.data.arrays import samples_per_chunk
from tutti.data.columns import Columns
from tutti.data.parts import PIXEL_MAX, Part, Scale
from tutti.data.rows import Array, Indices
from tutti.records.preparation import TargetUnits

_UNEVEN: Final = 100
"""Columns of floats whose deviations differ by more than this factor train badly."""

_LOOKED_AT: Final = 10_000
"""Samples that tell the deviations of columns."""


def pixel_scale(read: Callable[[Indices], Array], rows: Indices) -> Scale:
    """Return the scale of 8-bit inputs.

    Args:
        read: returns some samples, of shape (samples, ...); of four dimensions, the second is the channel.
        rows: the samples to use.
    """
    # Pieces of about 2^16 values in double precision stay in the cache, and sums of whole numbers are exact.
    first = read(rows[:1])
    step = max(1, (1 << 16) // first.size)
    channels = first.shape[1] if first.ndim == 4 else 1
    total, count = np.zeros((channels, 2)), 0
    for start in range(0, len(rows), step):
        some = read(rows[start : start + step]).astype(np.float64)
        some = some.reshape(len(some), channels, -1)
        total += np.stack([some.sum((0, 2)), np.einsum("scv,scv->c", some, some)], axis=1)
        count += some.size // channels
    mean, squares = total.T / count
    variance = squares - mean**2
    # A channel that never varies has no deviation to divide by; it becomes 0.
    std = np.where(variance > 0, np.sqrt(np.maximum(variance, 0)), PIXEL_MAX)
    return Scale(tuple((mean / PIXEL_MAX).tolist()), tuple((std / PIXEL_MAX).tolist()))


def mean_scale(inputs: Array, rows: Indices | None = None) -> Scale:
    """Return the scale that replaces NaN by the mean of each input, of shape (samples, ...).

    The means are over `rows`, by default all; an input without values there becomes 0.
    """
    rows = np.arange(len(inputs)) if rows is None else rows
    sums, known = np.zeros(inputs.shape[1:]), np.zeros(inputs.shape[1:], np.int64)
    step = samples_per_chunk(inputs)
    for start in range(0, len(rows), step):
        chunk = inputs[rows[start : start + step]]
        sums += np.nansum(chunk, axis=0, dtype=np.float64)
        known += (~np.isnan(chunk)).sum(axis=0)
    return Scale(fill=tuple((sums / np.maximum(known, 1)).reshape(-1).tolist()))


def units_of(targets: Array) -> TargetUnits | None:
    """Return mean and deviation of the amounts of some samples; None for class numbers and labels of 0 or 1.

    `targets` are of shape (samples, ...); the deviation of an amount that never varies is 1.
    """
    if targets.dtype.kind != "f" or np.isin(targets, (0, 1)).all():
        return None
    amounts = targets.reshape(len(targets), -1).astype(np.float64)
    stds = np.where((amounts == amounts[0]).all(0), 1, amounts.std(0))
    return TargetUnits(tuple(amounts.mean(0).tolist()), tuple(stds.tolist()))


def uneven(part: Part) -> str | None:
    """Return the advice to scale columns of floats that a model gets unscaled; None: they are alike."""
    stored = part.stored_inputs
    if isinstance(stored, Columns) or part.scale.preparation is not None:
        return None
    if stored.ndim != 2 or not stored.is_floating_point():
        return None
    rows = torch.arange(0, len(part), max(1, len(part) // _LOOKED_AT))
    some = cast("Tensor", part.take(rows)[0]).double().cpu().numpy()
    stds = np.nanstd(some, axis=0)
    stds = stds[(stds > 0) & ~np.isin(some, (0, 1)).all(axis=0)]  # flags may be rare
    if not stds.size or stds.max() <= _UNEVEN * stds.min():
        return None
    return (
        f"the columns of the inputs have deviations from {stds.min():.2g} to {stds.max():.2g}, and the model "
        "gets them as they are: scale them, as by scikit-learn's StandardScaler, or give a CSV or Parquet "
        "file or a frame, whose columns are scaled"
    )
