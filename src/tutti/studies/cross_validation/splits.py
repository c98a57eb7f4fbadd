"""The splits of a cross-validation, made by scikit-learn's splitters, once, before anything is trained.

    folds, repeats                 KFold, RepeatedKFold
    + stratified                   StratifiedKFold, RepeatedStratifiedKFold
    + groups                       GroupKFold
    + stratified, groups           StratifiedGroupKFold
    any object with split()        as it is: ShuffleSplit, LeaveOneGroupOut, TimeSeriesSplit, the user's own
    pairs of (train, test)         as they are

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    RepeatedKFold,
    RepeatedStratifiedKFold,
    StratifiedGroupKFold,
    StratifiedKFold,
)

from tutti.errors import BadData, BadOption
from tutti.records.splits import Split

Array = NDArray[Any]

Pairs = Iterable[Any]
"""Of each split (train, test): the numbers of the samples, or a mask of all."""


@runtime_checkable
class Splitter(Protocol):
    """A splitter such as those of `sklearn.model_selection`."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Pairs:
        """Yield (train, test) for each split."""


@dataclass(frozen=True)
class RepeatedGroups:
    """Folds of groups, repeated with other groups in each fold.

    Args:
        folds: of each repeat.
        repeats: how many.
        seed: decides which groups are in which fold.
        stratified: each fold has about the same share of each class.
    """

    folds: int
    repeats: int
    seed: int
    stratified: bool

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Array, Array]]:
        """Yield (train, test) for each split."""
        kind = StratifiedGroupKFold if self.stratified else GroupKFold
        seeds = np.random.SeedSequence(self.seed).generate_state(self.repeats, np.uint32)
        for seed in seeds:
            yield from kind(self.folds, shuffle=True, random_state=int(seed)).split(X, y, groups)


def splitter_of(
    folds: int = 5, repeats: int = 1, seed: int = 0, stratified: bool = False, grouped: bool = False
) -> Splitter:
    """Return the splitter of a k-fold cross-validation; every sample is held out once in each repeat.

    Args:
        folds: of each repeat.
        repeats: how often all samples are divided, each time in another way.
        seed: decides which samples are in which fold.
        stratified: each fold has the same share of each class, to a sample.
        grouped: samples of one group are in one fold.

    Raises:
        BadOption: there are fewer than two folds, or no repeat.
    """
    if folds < 2:
        raise BadOption(f"--folds is {folds}; the smallest possible is 2: one part to train on, one held out")
    if repeats < 1:
        raise BadOption(f"--repeats is {repeats}; the smallest possible is 1")
    if seed < 0:
        raise BadOption(f"--seed is {seed}; the smallest possible is 0")
    if grouped:
        return RepeatedGroups(folds, repeats, seed, stratified)
    if repeats == 1:
        kind = StratifiedKFold if stratified else KFold
        return cast(Splitter, kind(folds, shuffle=True, random_state=seed))
    several = RepeatedStratifiedKFold if stratified else RepeatedKFold
    return cast(Splitter, several(n_splits=folds, n_repeats=repeats, random_state=seed))


def make_splits(
    cv: int | Splitter | Pairs | object,
    targets: Array,
    groups: ArrayLike | None = None,
    labels: Sequence[str] = (),
) -> list[Split]:
    """Make the splits.

    Args:
        cv: a number of folds; a splitter, as of `splitter_of` or `sklearn.model_selection`; or pairs of
            (train, test).
        targets: of all samples, of shape (samples, ...).
        groups: of all samples; those of one group are never in both parts. None: there are none.
        labels: the classes' names, for messages.

    Raises:
        BadOption: the splitter cannot split these samples, or is none.
        BadData: a split is none of these samples, or a group is in both of its parts.
    """
    samples = len(targets)
    known = None if groups is None else _checked(groups, samples)
    if isinstance(cv, int | np.integer):
        cv = splitter_of(int(cv), grouped=known is not None)
    # Texts have a split, too.
    if isinstance(cv, str) or not isinstance(cv, Splitter | Iterable):
        raise BadOption(
            f"cv is a {type(cv).__name__}; give a number of folds, a splitter with a method split(X, y, "
            "groups), or pairs of (train, test)"
        )
    if isinstance(cv, Splitter):
        _refuse_rare(cv, targets, labels)
        pairs = _of_splitter(cv, targets, known)
    else:
        pairs = [_pair(pair, number) for number, pair in enumerate(cv)]
    if not pairs:
        raise BadOption(f"cv, a {type(cv).__name__}, gives no split; give at least one")
    found = []
    for number, (train, test) in enumerate(pairs):
        split = Split.of(_numbers(train, samples), _numbers(test, samples), samples, f"split {number}")
        if known is not None:
            _refuse_group_in_both(split, known, number)
        found.append(split)
    return found


def _checked(groups: ArrayLike, samples: int) -> Array:
    found: Array = np.asarray(groups)
    if found.shape != (samples,):
        raise BadData(
            f"the groups have the shape {found.shape}, and there are {samples:,} samples; give one group for "
            "each sample"
        )
    # NaN is the only value that is not the same as itself.
    lacking = np.fromiter((one is None or one != one for one in found), bool, samples)
    if lacking.any():
        first = int(lacking.argmax())
        nothing = "None" if found[first] is None else "NaN"
        raise BadData(f"sample {first} has no group, but {nothing}; give each sample one")
    try:
        np.unique(found)
    except TypeError as error:
        raise BadData(f"the groups have no order ({error}); give texts, or numbers") from error
    return found


def _refuse_rare(cv: Splitter, targets: Array, labels: Sequence[str]) -> None:
    """Refuse to stratify what has no classes, or a class with fewer samples than folds."""
    stratified = isinstance(cv, StratifiedKFold | RepeatedStratifiedKFold | StratifiedGroupKFold)
    if not (stratified or (isinstance(cv, RepeatedGroups) and cv.stratified)):
        return
    if targets.ndim != 1 or targets.dtype.kind not in "iu":
        raise BadOption(
            f"the targets are {targets.dtype} of shape {targets.shape}, which are no classes to be "
            "stratified by; leave --stratified out"
        )
    folds = cv.folds if isinstance(cv, RepeatedGroups) else _folds(cv)
    classes, counts = np.unique(targets, return_counts=True)
    rarest = int(counts.argmin())
    if counts[rarest] < folds:
        label = int(classes[rarest])
        name = f"'{labels[label]}'" if 0 <= label < len(labels) else str(label)
        raise BadOption(
            f"--folds is {folds}, but class {name} has {counts[rarest]} of the samples, and each fold needs "
            "one; give fewer --folds, or leave --stratified out"
        )


def _folds(cv: Any) -> int:
    """Return the number of folds of one repeat."""
    return int(cv.cvargs["n_splits"] if isinstance(cv, RepeatedStratifiedKFold) else cv.n_splits)


def _of_splitter(cv: Splitter, targets: Array, groups: Array | None) -> list[tuple[ArrayLike, ArrayLike]]:
    try:
        return list(cv.split(np.zeros((len(targets), 1)), targets, groups))
    except ValueError as error:
        wrong = "groups" in str(error) and groups is None
        advice = "give groups" if wrong else "choose another number of folds, or another splitter"
        raise BadOption(
            f"{type(cv).__name__} cannot split these {len(targets):,} samples: {str(error).rstrip('.')}; "
            f"{advice}"
        ) from error


def _pair(pair: object, number: int) -> tuple[ArrayLike, ArrayLike]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadOption(f"split {number} of cv is a {type(pair).__name__}; give pairs of (train, test)")
    return pair[0], pair[1]


def _numbers(part: ArrayLike, samples: int) -> ArrayLike:
    """Return the numbers that a mask of all samples stands for; numbers as they are."""
    found = np.asarray(part)
    return np.flatnonzero(found) if found.dtype == bool and found.shape == (samples,) else part


def _refuse_group_in_both(split: Split, groups: Array, number: int) -> None:
    both = np.intersect1d(groups[split.train], groups[split.test])
    if len(both):
        raise BadData(
            f"split {number} has samples of group {both[0]!s} in both parts; use a splitter that keeps "
            "groups together, such as sklearn.model_selection.GroupKFold"
        )
