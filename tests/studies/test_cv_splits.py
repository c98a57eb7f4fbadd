"""No sample or group is in both parts, and every sample is held out in each repeat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    RepeatedKFold,
    RepeatedStratifiedKFold,
    ShuffleSplit,
    StratifiedGroupKFold,
    StratifiedKFold,
    TimeSeriesSplit,
)

from tutti.errors import BadData, BadOption
from tutti.studies.cross_validation.splits import make_splits, splitter_of


def times_held_out(splits, samples):
    return np.bincount(np.concatenate([split.test for split in splits]), minlength=samples)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(10, 60),
    st.integers(0, 99),
)
def test_every_sample_is_held_out_once_in_each_repeat(folds, repeats, stratified, grouped, samples, seed):
    repeats = 1 if grouped else repeats
    random = np.random.default_rng(seed)
    targets = np.concatenate([np.repeat([0, 1], 5), random.integers(0, 2, samples - 10)])
    drawn = np.concatenate([np.arange(10), random.integers(0, 10, samples - 10)])
    groups = random.permutation(drawn) if grouped else None
    cv = splitter_of(folds, repeats, seed, stratified, grouped)
    splits = make_splits(cv, targets, groups)
    assert len(splits) == folds * repeats
    for repeat in range(repeats):
        some = splits[repeat * folds : (repeat + 1) * folds]
        assert times_held_out(some, samples).tolist() == [1] * samples
    for split in splits:
        assert not set(split.train) & set(split.test)
        assert len(split.train) + len(split.test) == samples
        if grouped:
            assert not set(groups[split.train]) & set(groups[split.test])
        if stratified and not grouped:
            share = np.bincount(targets, minlength=2) / folds
            assert (abs(np.bincount(targets[split.test], minlength=2) - share) < 1).all()
    again = make_splits(splitter_of(folds, repeats, seed, stratified, grouped), targets, groups)
    assert all(np.array_equal(one.test, other.test) for one, other in zip(splits, again, strict=True))


def test_repeats_and_seeds_give_different_splits():
    found = [make_splits(splitter_of(4, 2, seed), np.arange(60) % 3) for seed in (1, 2)]
    assert len({tuple(split.test.tolist()) for splits in found for split in splits}) == 16


SPLITTERS = [
    KFold(4),
    KFold(4, shuffle=True, random_state=1),
    StratifiedKFold(4),
    GroupKFold(4),
    StratifiedGroupKFold(4),
    RepeatedKFold(n_splits=4, n_repeats=2, random_state=1),
    RepeatedStratifiedKFold(n_splits=4, n_repeats=2, random_state=1),
    LeaveOneGroupOut(),
    ShuffleSplit(3, test_size=0.3, random_state=1),
    TimeSeriesSplit(4),
]


@pytest.mark.parametrize("cv", SPLITTERS, ids=lambda cv: type(cv).__name__)
def test_splitters_of_scikit_learn_are_used_as_they_are(cv):
    targets, groups = np.arange(40) % 4, np.arange(40) // 5
    groups = groups if "Group" in type(cv).__name__ else None
    wanted = list(cv.split(np.zeros((40, 1)), targets, groups))
    found = make_splits(cv, targets, groups)
    assert [(list(s.train), list(s.test)) for s in found] == [(sorted(a), sorted(b)) for a, b in wanted]
    if isinstance(cv, TimeSeriesSplit):
        assert all(split.train.max() < split.test.min() for split in found)


class Halves:
    """A user's splitter."""

    def split(self, X, y=None, groups=None):
        middle = len(X) // 2
        yield np.arange(middle), np.arange(middle, len(X))


def test_users_splitters_pairs_and_masks_are_used():
    targets = np.zeros(6)
    mask = np.array([True, True, False, False, False, True])
    for cv in (Halves(), [([2, 1, 0], [5, 4, 3])], iter([(np.arange(3), np.arange(3, 6))])):
        (split,) = make_splits(cv, targets)
        assert (split.train.tolist(), split.test.tolist()) == ([0, 1, 2], [3, 4, 5])
    (split,) = make_splits([(mask, ~mask)], targets)
    assert split.test.tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda targets: splitter_of(1), BadOption, "number of folds is 1; give at least 2"),
        (lambda targets: splitter_of(2, 0), BadOption, "--repeats is 0"),
        (lambda targets: splitter_of(2, 2, grouped=True), BadOption, "--repeats does not go with groups"),
        (lambda targets: make_splits(splitter_of(13), targets), BadOption, "cannot split these 12 samples"),
        (lambda targets: make_splits(LeaveOneGroupOut(), targets), BadOption, "should not be None"),
        (lambda targets: make_splits(StratifiedKFold(5), targets / 3), BadOption, "continuous"),
        (lambda targets: make_splits(StratifiedKFold(7), targets), BadOption, "n_splits=7"),
        (lambda targets: make_splits("5", targets), BadOption, "cv is a str; give a number of folds"),
        (lambda targets: make_splits([3], targets), BadOption, "cv is a list; give a number of folds"),
        (lambda targets: make_splits(KFold(2), targets, [1, 2]), BadData, r"groups have the shape \(2,\)"),
        (lambda targets: make_splits(Halves(), targets, ["Ada"] * 7 + ["Bob"] * 5), BadData, "group Ada in"),
        (lambda targets: make_splits([([1, 2, 3], [3, 4])], targets), BadData, "1 samples in both parts"),
    ],
)
def test_impossible_splits_are_refused(call, kind, said):
    with pytest.raises(kind, match=said):
        call(np.arange(12) % 2)
