"""The quality of a shuffle by windows, in figures.

A batch draws from the blocks of one window. If neighbours on the disk are alike, so are the samples of a
batch, and their classes, or the mean of their targets, vary more from batch to batch than in a full shuffle.
The ratio of the two variances is the design effect of cluster samples (Kish, "Survey Sampling", 1965): 1 for
a full shuffle, and 1 + (batch - 1) / blocks of a window where each block is of one class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tutti.data.streaming.windows import Windows

_WINDOWS: Final = 32
"""Windows that are looked at."""

_BATCHES: Final = 8
"""Batches of each of them."""

_TARGETS: Final = 1_000_000
"""Targets by which the shares of classes are known well enough."""


@dataclass(frozen=True)
class Shuffle:
    """The quality of a shuffle by windows.

    Attributes:
        blocks: from which a batch draws.
        of: how many blocks there are.
        share: of the samples from which a batch draws.
        spread: the variance of what batches consist of / that in a full shuffle, of these targets.
        sorted_spread: the same, were the samples sorted by class.
    """

    blocks: int
    of: int
    share: float
    spread: float
    sorted_spread: float

    def __str__(self) -> str:
        return (
            f"shuffle: a batch draws from {self.blocks:,} of {self.of:,} blocks ({self.share:.2%} of the "
            f"samples); "
            f"the targets of batches vary {self.spread:.2f} times as much as in a full shuffle (variance; "
            f"{self.sorted_spread:.2f} times, were all samples sorted by them)"
        )


def quality_of(windows: Windows, targets: Tensor, batch_size: int, seed: int) -> Shuffle:
    """Measure the shuffle of the first epoch.

    Args:
        windows: how the samples lie.
        targets: of them, of shape (samples, ...).
        batch_size: samples of a batch.
        seed: of the run.
    """
    order, batch = windows.order(seed, 0), min(batch_size, windows.largest)
    random = np.random.default_rng(0)
    some = random.choice(windows.count, min(_WINDOWS, windows.count), replace=False)
    batches = []
    for number in some.tolist():
        samples = order.window(number)
        starts = range(0, len(samples) - batch + 1, batch)[:_BATCHES]
        batches += [targets[samples[start : start + batch]] for start in starts]
    in_window, of = min(windows.blocks, windows.all_blocks), windows.all_blocks
    left = (of - in_window) / (of - 1) if of > 1 else 0.0
    return Shuffle(
        in_window,
        of,
        windows.largest / windows.samples,
        _spread(batches, targets) if batches else 1.0,
        1 + (batch - 1) / in_window * left,
    )


def _spread(batches: list[Tensor], targets: Tensor) -> float:
    """Return the variance of batches / that in a full shuffle: of the counts of classes, or of means."""
    if targets.is_floating_point():
        some = targets[:: max(1, len(targets) // _TARGETS)]
        flat = some.reshape(len(some), -1).double()
        mean, variance = flat.mean(0), flat.var(0, correction=0)
        varies = variance > 0
        means = torch.stack([one.reshape(len(one), -1).double().mean(0) for one in batches])
        found = (means - mean).square().mean(0) * len(batches[0]) / variance
        return float(found[varies].mean()) if varies.any() else 1.0
    some = targets[:: max(1, len(targets) // _TARGETS)]
    known = some.clamp(min=-1).flatten() + 1  # 0 is no label.
    counts = torch.bincount(known, minlength=int(targets.max()) + 2)
    there = counts > 0
    if int(there.sum()) < 2:
        return 1.0
    shares = counts[there].double() / len(known)
    ratios = []
    for one in batches:
        of_batch = torch.bincount(one.clamp(min=-1).flatten() + 1, minlength=len(counts))[there].double()
        due = shares * one.numel()
        ratios.append(float(((of_batch - due).square() / due).sum()) / (len(shares) - 1))
    return float(np.mean(ratios))
