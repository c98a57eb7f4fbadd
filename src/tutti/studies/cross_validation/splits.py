"""The splits of a cross-validation, made by scikit-learn's splitters before any training.

    folds, repeats                 RepeatedKFold
    + stratified                   RepeatedStratifiedKFold
    folds, groups                  GroupKFold
    + stratified                   StratifiedGroupKFold
    an object with split()         used as it is: ShuffleSplit, LeaveOneGroupOut, the user's own
    pairs of (train, test)         used as they are

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import GroupKFold, RepeatedKFold, RepeatedStratifiedKFold, StratifiedGroupKFold

from tutti.errors import BadData, BadOption
from tutti.records.splits import Split

Array = NDArray[Any]


def splitter_of(
    folds: int = 5, repeats: int = 1, seed: int = 0, stratified: bool = False, grouped: bool = False
) -> Any:
    """Return the splitter of a k-fold cross-validation; every sample is held out once in each repeat."""
    if folds < 2:
        raise BadOption(f"the number of folds is {folds}; give at least 2")
    if repeats < 1 or seed < 0:
        raise BadOption(f"--repeats is {repeats} and --seed {seed}; the smallest possible are 1 and 0")
    if grouped and repeats > 1:
        raise BadOption("--repeats does not go with groups; leave one of them out")
    if grouped:
        kind = StratifiedGroupKFold if stratified else GroupKFold
        return kind(folds, shuffle=True, random_state=seed)
    several = RepeatedStratifiedKFold if stratified else RepeatedKFold
    return several(n_splits=folds, n_repeats=repeats, random_state=seed)


def make_splits(
    cv: object, targets: Array, groups: ArrayLike | None = None, rest: Array | None = None
) -> list[Split]:
    """Make the splits of all samples, or of the samples in `rest`."""
    if rest is not None:
        splits = make_splits(cv, targets[rest], None if groups is None else np.asarray(groups)[rest])
        return [Split(rest[split.train], rest[split.test]) for split in splits]
    samples = len(targets)
    known = None if groups is None else np.asarray(groups)
    if known is not None and known.shape != (samples,):
        raise BadData(f"the groups have the shape {known.shape}; give one for each of {samples:,} samples")
    if hasattr(cv, "split") and not isinstance(cv, str):
        pairs = _of_splitter(cv, targets, known)
    elif isinstance(cv, Iterable) and not isinstance(cv, str):
        pairs = list(cv)
    else:
        pairs = []
    if not pairs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise BadOption(
            f"cv is a {type(cv).__name__}; give a number of folds, a splitter with a method split(X, y, "
            "groups), or pairs of (train, test)"
        )
    found = []
    for number, pair in enumerate(pairs):
        train, test = (_numbers(part, samples) for part in pair)
        split = Split.of(train, test, samples, f"split {number}")
        if known is not None and len(both := np.intersect1d(known[split.train], known[split.test])):
            raise BadData(
                f"split {number} has samples of group {both[0]!s} in both parts; use a splitter that keeps "
                "groups together, such as sklearn.model_selection.GroupKFold"
            )
        found.append(split)
    return found


def _of_splitter(cv: Any, targets: Array, groups: Array | None) -> list[Any]:
    try:
        return list(cv.split(np.zeros((len(targets), 1)), targets, groups))
    except (ValueError, TypeError) as error:
        raise BadOption(
            f"{type(cv).__name__} cannot split these {len(targets):,} samples: {str(error).rstrip('.')}; "
            "choose another number of folds, or another splitter"
        ) from error


def _numbers(part: ArrayLike, samples: int) -> ArrayLike:
    """Return the sample numbers of a mask; return numbers unchanged."""
    numbers = np.asarray(part)
    return np.flatnonzero(numbers) if numbers.dtype == bool and numbers.shape == (samples,) else part
