"""Targets are classes or values; what fits neither is refused with the first sample at fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti.data.contents import Contents
from tutti.data.targets import KnownClasses, with_checked_targets
from tutti.errors import BadData, NotFinite


def read(train, test=None, classes=None, labels=(), known=None):
    raw = {"train": np.asarray(train)} | ({} if test is None else {"test": np.asarray(test)})
    contents = Contents("some", {part: (y, y) for part, y in raw.items()}, labels=labels)
    found = with_checked_targets(contents, classes, known)
    return replace(found, parts={part: y for part, (_, y) in found.parts.items()})


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "bool"])
def test_whole_numbers_are_classes(dtype):
    found = read(np.array([0, 1, 1, 0], dtype))
    assert found.classes == 2
    assert found.parts["train"].dtype == np.int64
    assert found.parts["train"].tolist() == [0, 1, 1, 0]


def test_a_column_of_classes_is_flattened():
    assert read([[0], [2]]).parts["train"].tolist() == [0, 2]


def test_texts_are_classes_in_sorted_order_over_all_parts():
    found = read(["dog", "cat", "ant"], test=["ant", "cat"])
    assert found.labels == ("ant", "cat", "dog")
    assert found.classes == 3
    assert found.parts["train"].tolist() == [2, 1, 0]
    assert found.parts["test"].tolist() == [0, 1]


def test_floats_are_values():
    found = read([[0.5], [2.0]])
    assert found.classes is None
    assert found.parts["train"].dtype == np.float32
    assert found.parts["train"].shape == (2, 1)


def test_floats_are_classes_when_their_number_is_given():
    found = read([0.0, 2.0], classes=3)
    assert found.classes == 3
    assert found.parts["train"].dtype == np.int64


def test_several_flags_for_each_sample_are_floats():
    found = read([[0, 1, 1], [1, 0, 0]])
    assert found.classes is None
    assert found.parts["train"].tolist() == [[0, 1, 1], [1, 0, 0]]


def test_names_of_classes_are_kept_when_they_fit():
    assert read([0, 1], labels=("a", "b", "c")).classes == 3
    assert read([0, 1], labels=("a", "b", "c")).labels == ("a", "b", "c")
    assert read([0, 3], labels=("a", "b", "c")).labels == ()


def test_a_sample_may_have_no_label():
    found = read([0, -100, 2, 1], test=[-100, 1])
    assert found.classes == 3
    assert found.parts["train"].tolist() == [0, -100, 2, 1]


def test_each_position_may_have_a_class_where_the_classes_are_given():
    found = read([[0, 2, -100], [1, 1, 0]], classes=3)
    assert found.classes == 3
    assert found.parts["train"].tolist() == [[0, 2, -100], [1, 1, 0]]
    assert read([[0, 1], [1, 1]], classes=2).parts["train"].dtype == np.int64


PETS = KnownClasses(3, ("cat", "cow", "dog"))


@pytest.mark.parametrize(
    ("targets", "labels", "numbers"),
    [
        (["cow", "dog", "cow"], (), [1, 2, 1]),
        (["dog", "dog", "dog"], (), [2, 2, 2]),
        ([0, 1, -100, 0], ("dog", "cow"), [2, 1, -100, 2]),
        ([2, 2, 0], (), [2, 2, 0]),
        ([1.0, 0.0, 1.0], (), [1, 0, 1]),
    ],
)
def test_classes_have_the_numbers_that_a_model_knows(targets, labels, numbers):
    for given in (None, 3):
        found = read(targets, classes=given, labels=labels, known=PETS)
        assert found.parts["train"].tolist() == numbers
        assert found.classes == 3


def test_whole_numbers_are_amounts_for_a_model_of_amounts():
    found = read([1, 2, 2], known=KnownClasses(None))
    assert found.classes is None
    assert found.parts["train"].dtype == np.float32


def test_a_class_without_a_name_is_no_missing_label():
    known = KnownClasses(2, ("", "cat"))
    assert read(["cat", "", "cat"], known=known).parts["train"].tolist() == [1, 0, 1]
    found = read([1, 0, -100], labels=("", "cat"), known=known)
    assert found.parts["train"].tolist() == [1, 0, -100]


@pytest.mark.parametrize(
    ("train", "others", "said"),
    [
        (["a", "b", "c"], {"classes": 2}, "3 different texts, but 2 classes"),
        ([["a", "b"], ["b", "a"]], {}, r"texts of shape \(2, 2\)"),
        ([0, 1], {"test": ["a", "b"]}, "test targets are of type <U1"),
        ([0.0, 1.5, 2.5], {"classes": 3}, r"sample 1 has 1\.5, and 2 of 3 are not whole"),
        ([[0, 1, 2], [1, 0, 0]], {}, r"of the shape \(2, 3\).*--data\.classes N"),
        ([0, 0, 0], {}, r"--data\.classes N"),
        (np.zeros((3, 0)), {}, r"shape \(3, 0\)"),
        ([1, -1, 1, -1], {}, r"2 labels outside 0\.\.1: sample 1 has -1"),
        ([0, 1], {"test": [0, 9, 10], "classes": 10}, r"test .* outside 0\.\.9: sample 2 has 10"),
        ([[0, 2], [1, 3], [0, 0]], {"classes": 3}, r"1 labels outside 0\.\.2: sample 1 has 3"),
        ([10, 20, 50000], {}, "whole numbers up to 50,000 for 3 samples"),
        ([0.0, float("nan")], {}, "in 1 of 2 samples, first in sample 1"),
        ([1j, 2j], {}, "train targets are of type complex128"),
        ([-100, -100], {}, "no sample has a label"),
        (["dog", "ant"], {"known": PETS}, "class 'ant', but the model was trained on cat, cow, dog"),
        ([0, 1], {"labels": ("dog", "ant"), "known": PETS}, "the class 'ant'"),
        ([0, 3], {"known": PETS}, r"outside 0\.\.2: sample 1 has 3"),
        (["dog", "cow"], {"known": KnownClasses(None)}, "but the model was trained on amounts"),
    ],
)
def test_targets_that_fit_no_kind_are_refused(train, others, said):
    with pytest.raises((BadData, NotFinite), match=said):
        read(train, **others)


def test_the_number_of_classes_may_be_given():
    assert read([0, 0, 0], classes=2).classes == 2
    assert read([10, 20, 50000], classes=50001).classes == 50001
