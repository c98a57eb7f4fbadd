"""The split of the training samples into those to train on and those kept aside for validation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tutti.data.rows import Array
from tutti.errors import BadData

Indices = NDArray[np.int64]


def split(targets: Array, share: float, seed: int, classes: int | None) -> tuple[Indices, Indices]:
    """Choose the samples to train on and those kept aside, each in their stored order.

    With classes, every class gives the same share (to a sample), and its last sample is always trained on;
    samples without a label are one more.

    Args:
        targets: of shape (samples, ...).
        share: of the samples to be kept aside, 0 to below 1.
        seed: decides which.
        classes: the number of classes; None for float targets. These, and targets of several labels for
            each sample, are split without regard to them.

    Raises:
        BadData: one of the two would be empty.
    """
    count = len(targets)
    if share == 0:
        return np.arange(count), np.arange(0)
    random = np.random.default_rng((seed, 0x5EED))
    wanted = round(share * count)
    if wanted == 0 or wanted == count:
        empty = "validation" if wanted == 0 else "training"
        raise BadData(
            f"a validation share of {share} of {count:,} samples leaves {empty} without any; "
            f"use '--validation 0' for none, or a share that leaves both some"
        )
    if classes is None or targets.ndim > 1:
        aside = random.permutation(count)[:wanted]
    else:
        groups_of = np.where(targets < 0, classes, targets)
        sizes = np.bincount(groups_of, minlength=classes + 1)
        quotas = _quotas(sizes, wanted)
        groups = np.split(np.argsort(groups_of, kind="stable"), np.cumsum(sizes)[:-1])
        aside = np.concatenate([random.permutation(g)[:q] for g, q in zip(groups, quotas, strict=True)])
    if len(aside) == 0:
        raise BadData(
            "every class has a single sample, so none can be kept for validation; use '--validation 0'"
        )
    kept = np.ones(count, dtype=bool)
    kept[aside] = False
    return np.flatnonzero(kept), np.flatnonzero(~kept)


def _quotas(sizes: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Return the number of samples of each class: proportional, `wanted` in all, but never a class's last."""
    exact = sizes * (wanted / sizes.sum())
    most = np.maximum(sizes - 1, 0)
    quotas: NDArray[np.int64] = np.minimum(np.floor(exact).astype(np.int64), most)
    for label in np.argsort(quotas - exact, kind="stable"):
        if quotas.sum() < wanted and quotas[label] < most[label]:
            quotas[label] += 1
    return quotas
