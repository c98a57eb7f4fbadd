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


def test_texts_that_fit_no_class_count_or_part_are_refused():
    with pytest.raises(BadData, match="3 different texts, but 2 classes"):
        read(["a", "b", "c"], classes=2)
    with pytest.raises(BadData, match=r"texts of shape \(2, 2\)"):
        read([["a", "b"], ["b", "a"]])
    with pytest.raises(BadData, match="test targets are of type <U1"):
        read([0, 1], test=["a", "b"])


def test_floats_are_values():
    found = read([[0.5], [2.0]])
    assert found.classes is None
    assert found.parts["train"].dtype == np.float32
    assert found.parts["train"].shape == (2, 1)


def test_floats_are_classes_when_their_number_is_given():
    found = read([0.0, 2.0], classes=3)
    assert found.classes == 3
    assert found.parts["train"].dtype == np.int64


def test_floats_that_are_not_whole_are_no_classes():
    with pytest.raises(BadData, match=r"no class numbers: sample 1 has 1\.5, and 2 of 3 are not whole"):
        read([0.0, 1.5, 2.5], classes=3)


def test_several_flags_for_each_sample_are_floats():
    found = read([[0, 1, 1], [1, 0, 0]])
    assert found.classes is None
    assert found.parts["train"].tolist() == [[0, 1, 1], [1, 0, 0]]
    with pytest.raises(BadData, match=r"of the shape \(2, 3\).*--data\.classes N"):
        read([[0, 1, 2], [1, 0, 0]])


@pytest.mark.parametrize("targets", [[0, 0, 0]])
def test_a_single_class_is_refused_unless_others_are_announced(targets):
    with pytest.raises(BadData, match=r"--data\.classes N"):
        read(targets)
    assert read(targets, classes=2).classes == 2


def test_targets_without_numbers_are_refused():
    with pytest.raises(BadData, match=r"shape \(3, 0\)"):
        read(np.zeros((3, 0)))


def test_labels_below_zero_are_refused():
    with pytest.raises(BadData, match=r"train targets have 2 labels outside 0\.\.classes-1: sample 1 has -1"):
        read([1, -1, 1, -1])


def test_labels_beyond_the_given_classes_are_refused():
    with pytest.raises(
        BadData, match=r"test targets have 1 labels outside 0\.\.9: sample 2 has 10.*raise --data\.classes"
    ):
        read([0, 1], test=[0, 9, 10], classes=10)


def test_amounts_are_not_taken_for_classes():
    with pytest.raises(BadData, match="whole numbers up to 50,000 for 3 samples, which look like amounts"):
        read([10, 20, 50000])
    assert read([10, 20, 50000], classes=50001).classes == 50001


def test_float_targets_must_be_finite():
    with pytest.raises(
        NotFinite, match=r"train targets hold NaN or inf .* in 1 of 2 samples, first in sample 1"
    ):
        read([0.0, float("nan")])


def test_names_of_classes_are_kept_when_they_fit():
    assert read([0, 1], labels=("a", "b", "c")).classes == 3
    assert read([0, 1], labels=("a", "b", "c")).labels == ("a", "b", "c")
    assert read([0, 3], labels=("a", "b", "c")).labels == ()


def test_other_types_are_refused():
    with pytest.raises(BadData, match="train targets are of type complex128"):
        read([1j, 2j])


def test_a_sample_may_have_no_label():
    found = read([0, -100, 2, 1], test=[-100, 1])
    assert found.classes == 3
    assert found.parts["train"].tolist() == [0, -100, 2, 1]


def test_labels_are_needed_somewhere():
    with pytest.raises(BadData, match="no sample has a label"):
        read([-100, -100])


def test_each_position_may_have_a_class_where_the_classes_are_given():
    found = read([[0, 2, -100], [1, 1, 0]], classes=3)
    assert found.classes == 3
    assert found.parts["train"].tolist() == [[0, 2, -100], [1, 1, 0]]
    assert read([[0, 1], [1, 1]], classes=2).parts["train"].dtype == np.int64


def test_a_label_at_fault_is_found_in_its_sample():
    with pytest.raises(BadData, match=r"1 labels outside 0\.\.2: sample 1 has 3"):
        read([[0, 2], [1, 3], [0, 0]], classes=3)


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


def test_classes_that_a_model_does_not_know_are_refused():
    with pytest.raises(BadData, match="has the class 'ant', but the model was trained on cat, cow, dog"):
        read(["dog", "ant"], known=PETS)
    with pytest.raises(BadData, match="has the class 'ant'"):
        read([0, 1], labels=("dog", "ant"), known=PETS)
    with pytest.raises(BadData, match="has the class 3, but the model was trained on 3 classes"):
        read([0, 3], known=PETS)
    with pytest.raises(BadData, match="but the model was trained on amounts"):
        read(["dog", "cow"], known=KnownClasses(None))


def test_whole_numbers_are_amounts_for_a_model_of_amounts():
    found = read([1, 2, 2], known=KnownClasses(None))
    assert found.classes is None
    assert found.parts["train"].dtype == np.float32


def test_a_class_without_a_name_is_no_missing_label():
    known = KnownClasses(2, ("", "cat"))
    assert read(["cat", "", "cat"], known=known).parts["train"].tolist() == [1, 0, 1]
    found = read([1, 0, -100], labels=("", "cat"), known=known)
    assert found.parts["train"].tolist() == [1, 0, -100]
