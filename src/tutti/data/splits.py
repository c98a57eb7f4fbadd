"""The division of the training samples into those to train on, a validation part and a test part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tutti.data.rows import Array
from tutti.errors import BadData

Indices = NDArray[np.int64]


def divide(
    targets: Array,
    test: float,
    validation: float,
    seed: int,
    classes: int | None,
    groups: Array | None = None,
) -> tuple[Indices, Indices, Indices]:
    """Choose the samples to train on, a validation part and a test part, each in their stored order.

    The validation share is of the samples outside the test part; otherwise as for `split`.
    """
    if not test:
        return *split(targets, validation, seed, classes, groups), np.arange(0)
    rest, tested = split(targets, test, seed, classes, groups, "test")
    train, aside = split(targets[rest], validation, seed, classes, None if groups is None else groups[rest])
    return rest[train], rest[aside], tested


def split(
    targets: Array,
    share: float,
    seed: int,
    classes: int | None,
    groups: Array | None = None,
    part: str = "validation",
) -> tuple[Indices, Indices]:
    """Choose the samples to train on and those held out, each in their stored order.

    With classes, every class gives the same share (to a sample), and its last sample is always trained on;
    samples without a label form another class. With groups, whole groups are held out, regardless of classes.

    Args:
        targets: of shape (samples, ...).
        share: of the samples to hold out, 0 to below 1.
        seed: decides which.
        classes: the number of classes; None for float targets. These, and targets of several labels for
            each sample, do not affect the split.
        groups: the number of each sample's group, from 0.
        part: the name of the held-out part, for messages.
    """
    count = len(targets)
    if share == 0:
        return np.arange(count), np.arange(0)
    random = np.random.default_rng((seed, 0x5EED))
    wanted = round(share * count)
    if wanted == 0 or wanted == count:
        empty = part if wanted == 0 else "training"
        raise BadData(
            f"a {part} share of {share} of {count:,} samples leaves {empty} without any; "
            f"use '--{part} 0' for none, or a share that leaves both some"
        )
    if groups is not None:
        aside = _whole_groups(groups, wanted, random)
        if len(aside) == count:
            raise BadData(f"all samples are of one group, so none can be kept for {part}; use '--{part} 0'")
    elif classes is None or targets.ndim > 1:
        aside = random.permutation(count)[:wanted]
    else:
        labels = np.where(targets < 0, classes, targets)
        sizes = np.bincount(labels, minlength=classes + 1)
        quotas = _quotas(sizes, wanted)
        alike = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
        aside = np.concatenate([random.permutation(one)[:q] for one, q in zip(alike, quotas, strict=True)])
    if len(aside) == 0:
        raise BadData(f"every class has a single sample, so none can be kept for {part}; use '--{part} 0'")
    kept = np.ones(count, dtype=bool)
    kept[aside] = False
    return np.flatnonzero(kept), np.flatnonzero(~kept)


def _whole_groups(groups: Array, wanted: int, random: np.random.Generator) -> Indices:
    """Return the samples of random groups that fit into `wanted` samples, or the smallest group."""
    sizes = np.bincount(groups)
    there = random.permutation(np.flatnonzero(sizes))
    taken = np.zeros(len(sizes), dtype=bool)
    for group in there:
        if sizes[group] <= wanted:
            taken[group] = True
            wanted -= sizes[group]
    if not taken.any():
        taken[there[np.argmin(sizes[there])]] = True
    return np.flatnonzero(taken[groups])


def _quotas(sizes: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Return the held-out samples of each class: proportional, `wanted` in all, but never a class's last."""
    exact = sizes * (wanted / sizes.sum())
    most = np.maximum(sizes - 1, 0)
    quotas: NDArray[np.int64] = np.minimum(np.floor(exact).astype(np.int64), most)
    for label in np.argsort(quotas - exact, kind="stable"):
        if quotas.sum() < wanted and quotas[label] < most[label]:
            quotas[label] += 1
    return quotas
