"""No sample and no group is ever in both parts, and every sample is held out as often as it must be."""

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
    random = np.random.default_rng(seed)
    targets = np.concatenate([np.repeat([0, 1], 5), random.integers(0, 2, samples - 10)])
    groups = (
        random.permutation(np.concatenate([np.arange(10), random.integers(0, 10, samples - 10)]))
        if grouped
        else None
    )
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


@pytest.mark.parametrize("grouped", [False, True])
def test_repeats_and_seeds_divide_in_other_ways(grouped):
    targets, groups = np.arange(60) % 3, np.arange(60) // 3 if grouped else None

    def tests(seed):
        return [
            split.test.tolist()
            for split in make_splits(splitter_of(4, 2, seed, grouped=grouped), targets, groups)
        ]

    one, other = tests(1), tests(2)
    assert len({tuple(test) for test in [*one, *other]}) == 16


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
def test_every_splitter_of_scikit_learn_gives_its_own_splits(cv):
    targets, groups = np.arange(40) % 4, np.arange(40) // 5
    groups = groups if "Group" in type(cv).__name__ else None
    wanted = list(cv.split(np.zeros((40, 1)), targets, groups))
    found = make_splits(cv, targets, groups)
    assert [(list(s.train), list(s.test)) for s in found] == [(sorted(a), sorted(b)) for a, b in wanted]
    if isinstance(cv, TimeSeriesSplit):
        assert all(split.train.max() < split.test.min() for split in found)


class Halves:
    """A splitter of a user's own."""

    def split(self, X, y=None, groups=None):
        middle = len(X) // 2
        yield np.arange(middle), np.arange(middle, len(X))


def test_a_splitter_of_the_users_own_pairs_and_masks_are_taken():
    targets = np.zeros(6)
    mask = np.array([True, True, False, False, False, True])
    for cv in (Halves(), [([2, 1, 0], [5, 4, 3])], iter([(np.arange(3), np.arange(3, 6))])):
        (split,) = make_splits(cv, targets)
        assert (split.train.tolist(), split.test.tolist()) == ([0, 1, 2], [3, 4, 5])
    (split,) = make_splits([(mask, ~mask)], targets)
    assert split.test.tolist() == [2, 3, 4]
    assert len(make_splits(3, targets)) == len(make_splits(np.int64(3), targets)) == 3


def test_folds_beyond_the_samples_of_the_rarest_class_are_refused_with_its_name():
    targets = np.repeat([0, 1, 2], [20, 3, 1])
    for cv in (
        splitter_of(5, 1, 0, True),
        splitter_of(5, 2, 0, True),
        StratifiedKFold(5),
        splitter_of(5, 1, 0, True, True),
    ):
        groups = (
            np.arange(23) if not isinstance(cv, StratifiedKFold) and "Groups" in type(cv).__name__ else None
        )
        with pytest.raises(BadOption, match=r"--folds is 5, but class 'Bag' has 3 of the samples"):
            make_splits(cv, targets[:-1], groups, labels=("Shirt", "Bag", "Boot"))
    with pytest.raises(BadOption, match=r"--folds is 2, but class 2 has 1 of the samples"):
        make_splits(splitter_of(2, stratified=True), targets)
    assert len(make_splits(splitter_of(3, stratified=True), targets[:-1])) == 3
    assert len(make_splits(splitter_of(5), targets)) == 5


def test_what_cannot_be_split_is_refused():
    targets = np.arange(12) % 2
    cases = [
        (lambda: splitter_of(1), "--folds is 1; the smallest possible is 2"),
        (lambda: splitter_of(2, 0), "--repeats is 0"),
        (lambda: splitter_of(2, 1, -1), "--seed is -1"),
        (lambda: make_splits(splitter_of(13), targets), "KFold cannot split these 12 samples: .*n_splits=13"),
        (lambda: make_splits(splitter_of(5, grouped=True), targets, np.arange(12) // 3), "number of groups"),
        (lambda: make_splits(splitter_of(5, stratified=True), targets / 3), "no classes to be stratified by"),
        (lambda: make_splits(LeaveOneGroupOut(), targets), "should not be None; give groups$"),
        (lambda: make_splits("5", targets), "cv is a str; give a number of folds"),
        (lambda: make_splits(None, targets), "cv is a NoneType"),
        (lambda: make_splits([], targets), "gives no split"),
        (lambda: make_splits([3], targets), "split 0 of cv is a int; give pairs"),
    ]
    for call, said in cases:
        with pytest.raises(BadOption, match=said):
            call()


def test_groups_that_do_not_fit_are_refused():
    targets = np.arange(12) % 2
    with pytest.raises(BadData, match=r"groups have the shape \(3,\), and there are 12 samples"):
        make_splits(splitter_of(2, grouped=True), targets, [1, 2, 3])
    with pytest.raises(BadData, match="sample 4 has no group, but NaN"):
        make_splits(splitter_of(2, grouped=True), targets, np.where(np.arange(12) == 4, np.nan, 1.0))
    with pytest.raises(BadData, match="split 0 has samples of group Ada in both parts"):
        make_splits(Halves(), targets, ["Ada"] * 7 + ["Bob"] * 5)
    with pytest.raises(BadData, match="split 0 has 1 samples in both parts, the first of them 3"):
        make_splits([([1, 2, 3], [3, 4])], targets)
