"""The weights by which epochs draw samples, with replacement.

chances         0.2   0.5   0.3
their sums      0.2   0.7   1.0         cumulated
drawn           0.41 ──► sample 1       from a generator of (seed, epoch), the same on all ranks
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from tutti.data.arrays import as_weights
from tutti.data.formats.npy import read_npy
from tutti.data.parts import Part
from tutti.data.targets import NO_LABEL
from tutti.errors import BadData, BadOption

BALANCED: Final = "balanced"
"""Every class is drawn as often as any other."""


def chances_of(given: object, part: Part) -> Tensor:
    """Return the weight of each sample of a part, of shape (samples,), in float64.

    `given` is `BALANCED`, a weight for each training sample of the source, or the path of an NPY file.
    """
    if isinstance(given, str) and given == BALANCED:
        return _balanced(part.targets.cpu())
    values = read_npy(Path(given)) if isinstance(given, str) else given
    found = as_weights(values, len(part.stored_targets), "the weights of --sampling")
    weights = torch.from_numpy(found)
    mine = weights if part.rows is None else weights[part.rows.cpu()]
    if not mine.any():
        raise BadData(
            "the weights of --sampling are all 0 for the samples to train on; give one a larger one"
        )
    return mine


def draw(cumulated: Tensor, generator: torch.Generator) -> Tensor:
    """Draw positions with replacement, a number for each sample, by cumulated weights."""
    points = torch.rand(len(cumulated), generator=generator, dtype=torch.float64)
    # The first whose sum is above the point: none with weight 0. A point may be rounded up to the whole sum.
    last = torch.searchsorted(cumulated, cumulated[-1])
    return torch.searchsorted(cumulated, points * cumulated[-1], right=True).minimum(last)


def _balanced(targets: Tensor) -> Tensor:
    """Return weights by which each class, or each of the values 0 and 1, is drawn equally often."""
    labels = targets.flatten() if targets.numel() == len(targets) else None
    classes = labels is not None and bool((labels == labels.floor()).all())
    if labels is None or not classes:
        raise BadOption(
            "--sampling balanced draws classes equally often, and here a sample has no single class; give "
            "weights of the samples in an NPY file, or leave it out"
        )
    found, numbers, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    weights = (1 / counts.double()).where(found != NO_LABEL, 0.0)
    mine: Tensor = weights[numbers]
    return mine
