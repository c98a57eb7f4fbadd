"""Validation and test parts have the same share of each class, or whole groups; the seed alone decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.data.splits import divide, split
from tutti.errors import BadData


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=200), st.floats(0.05, 0.9), st.integers(0, 99))
def test_parts_cover_everything_and_no_class_loses_its_last_sample(labels, share, seed):
    targets = np.array(labels)
    wanted = round(share * len(targets))
    many = np.bincount(targets).max() > 1
    if wanted in (0, len(targets)) or not many:
        return
    train, validation = split(targets, share, seed, classes=7)
    assert sorted([*train, *validation]) == list(range(len(targets)))
    assert set(targets[train]) == set(labels)
    assert 0 < len(validation) <= wanted


def test_each_class_gives_the_same_share():
    targets = np.repeat([0, 1, 2], [1000, 500, 33])
    train, validation = split(targets, 0.1, 0, classes=3)
    assert len(validation) == 153
    assert np.bincount(targets[validation]).tolist() == [100, 50, 3]
    assert len(train) == len(targets) - 153


@pytest.mark.parametrize("groups", [None, np.arange(900) % 60], ids=["classes", "groups"])
def test_a_test_part_is_taken_before_the_validation_part(groups):
    targets = np.arange(900) % 3
    train, validation, test = divide(targets, 0.2, 0.1, 5, 3, groups)
    assert sorted([*train, *validation, *test]) == list(range(900))
    assert (len(test), len(validation)) == ((180, 72) if groups is None else (180, 60))
    if groups is None:
        assert np.bincount(targets[test]).tolist() == [60, 60, 60]
        assert np.bincount(targets[validation]).tolist() == [24, 24, 24]
    else:
        assert len(np.unique(groups[train])) + len({*groups[validation]}) + len({*groups[test]}) == 60
    again = divide(targets, 0.2, 0.1, 5, 3, groups)
    other = divide(targets, 0.2, 0.1, 6, 3, groups)
    assert again[2].tolist() == test.tolist() != other[2].tolist()


def test_groups_larger_than_the_share_give_the_smallest_one():
    groups = np.repeat([0, 1, 2], [40, 25, 35])
    train, aside = split(np.zeros(100, int), 0.1, 0, 1, groups)
    assert {*groups[aside]} == {1}
    assert len(train) == 75


def test_the_seed_alone_decides():
    targets = np.arange(500) % 5
    first, again, other = (split(targets, 0.2, seed, classes=5)[1] for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_float_targets_are_split_plainly():
    train, validation = split(np.random.default_rng(0).random(50), 0.2, 0, classes=None)
    assert len(validation) == 10
    assert sorted([*train, *validation]) == list(range(50))


def test_a_share_of_zero_keeps_nothing_aside():
    train, validation = split(np.zeros(5, int), 0, 0, classes=1)
    assert train.tolist() == [0, 1, 2, 3, 4]
    assert len(validation) == 0


def test_a_share_that_leaves_a_part_empty_is_refused():
    with pytest.raises(BadData, match=r"share of 0\.001 of 100 samples leaves validation without any"):
        split(np.zeros(100, int), 0.001, 0, classes=1)
    with pytest.raises(BadData, match="leaves training without any"):
        split(np.zeros(3, int), 0.99, 0, classes=1)
    with pytest.raises(BadData, match="every class has a single sample"):
        split(np.arange(10), 0.5, 0, classes=10)
    with pytest.raises(BadData, match=r"share of 0\.001 .* leaves test without any; use '--test 0'"):
        divide(np.zeros(100, int), 0.001, 0.1, 0, 1)
    with pytest.raises(BadData, match="all samples are of one group"):
        split(np.zeros(10, int), 0.5, 0, 1, np.zeros(10, int))


def test_samples_without_a_label_give_their_share_too():
    targets = np.repeat([0, 1, -100], [100, 50, 150])
    train, validation = split(targets, 0.1, 0, classes=2)
    assert [(targets[validation] == label).sum() for label in (0, 1, -100)] == [10, 5, 15]
    assert len(train) == 270
