"""Targets are classes or values; what fits neither is refused with the first sample at fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.utils.multiclass import type_of_target

from tutti.data.contents import Contents
from tutti.data.targets import KnownClasses, meant_by, with_checked_targets
from tutti.errors import BadData, NotFinite


def read(train, test=None, classes=None, labels=(), known="classes", columns=(), targets=()):
    raw = {"train": np.asarray(train)} | ({} if test is None else {"test": np.asarray(test)})
    parts = {part: (y, y) for part, y in raw.items()}
    contents = Contents("some", parts, labels=labels, columns=columns, targets=targets)
    found = with_checked_targets(contents, classes, known)
    return replace(found, parts={part: y for part, (_, y) in found.parts.items()})


TABLE = {"columns": ("a", "b")}
ALL = np.arange(60)
KINDS = {
    "binary": [[0.0, 1.0, 0.0], [2, 1, 2], ["yes", "no", "no"], [True, False, True], [-1, 1, 1]],
    "multiclass": [[3, 5, 7, 3], [1.0, 2.0, 3.0], ["a", "b", "c"], ALL % 20, ALL % 20 + 1.0],
    "continuous": [[0.5, 1.0, 2.0], ALL / 7],
    "multilabel-indicator": [[[0, 1, 1], [0, 0, 1]], [[0.0, 1.0], [0.0, 0.0]]],
    "continuous-multioutput": [[[0.5, 1.0], [2.0, 3.0]]],
}


@pytest.mark.parametrize("where", [{}, TABLE], ids=["array", "table"])
@pytest.mark.parametrize(("kind", "targets"), [(kind, y) for kind, ys in KINDS.items() for y in ys])
def test_targets_are_taken_as_scikit_learn_takes_them(kind, targets, where):
    assert type_of_target(targets) == kind
    found = read(targets, **where)
    values, at = np.unique(targets, return_inverse=True)
    if kind in ("binary", "multiclass"):
        assert (found.classes, found.parts["train"].tolist()) == (len(values), at.tolist())
        assert list(found.labels or range(len(values))) == values.tolist()
    else:
        assert (found.classes, found.parts["train"].dtype) == (None, np.float32)


@pytest.mark.parametrize(
    ("targets", "where", "classes", "labels"),
    [
        (ALL % 10, {}, 10, ()),
        (ALL % 10, TABLE, 10, ()),
        ([0, 2, 0], {}, 3, ()),  # class numbers of an array, of which one is lacking
        ([0, 2, 0], TABLE, 2, (0, 2)),
        (ALL % 30, {}, 30, ()),
        (ALL % 30 + 1, {}, 30, tuple(range(1, 31))),
        (np.eye(3)[ALL % 3], {}, 3, ()),
        (np.eye(2, dtype=int)[ALL % 2], {"targets": ("no", "yes")}, 2, ("no", "yes")),
    ],
)
def test_numbers_of_classes_stay_and_other_labels_name_them(targets, where, classes, labels):
    found = read(targets, **where)
    assert (found.classes, found.labels) == (classes, labels)


def test_a_loss_on_amounts_decides_what_whole_numbers_are():
    for targets, where, meant in (
        ([3, 5, 7], TABLE, "amounts"),
        ([3.0, 5.0, 7.0], {}, "amounts"),
        (ALL * 7, {}, "amounts"),
        ([0.0, 1.0, 1.0], {}, "as given"),
        ([[2, 3], [4, 5]], {}, "amounts"),
        (np.eye(3), {}, "as given"),
    ):
        found = read(targets, known=meant, **where)
        assert (found.classes, found.parts["train"].tolist()) == (None, np.asarray(targets).tolist())
    assert read([0, 1, 2], known="amounts").classes == 3
    assert [meant_by(loss) for loss in ("nll", "l1", "own.py:loss")] == ["classes", "amounts", "as given"]


@pytest.mark.parametrize("where", [{}, TABLE], ids=["array", "table"])
def test_many_whole_numbers_of_few_samples_each_are_amounts(where):
    for prices in (ALL * 100 + 900, np.repeat(ALL[:30], 4) * 1000):
        assert read(prices, **where).parts["train"].tolist() == prices.tolist()


@pytest.mark.parametrize(
    ("targets", "given", "classes", "found"),
    [
        *((np.array([0, 1, 1, 0], dtype), {}, 2, [0, 1, 1, 0]) for dtype in ("uint8", "int16", "int64")),
        ([[0], [2]], {}, 3, [0, 2]),
        ([0.0, 2.0], {"classes": 3}, 3, [0, 2]),
        ([[0.5], [2.0]], {}, None, [[0.5], [2]]),
        ([[0, 1, 1], [1, 0, 0]], {}, None, [[0, 1, 1], [1, 0, 0]]),
        ([0, -100, 2, 1], {"test": [-100, 1]}, 3, [0, -100, 2, 1]),
        # Where the number of classes is given, each position may have one.
        ([[0, 2, -100], [1, 1, 0]], {"classes": 3}, 3, [[0, 2, -100], [1, 1, 0]]),
        ([[0, 1], [1, 1]], {"classes": 2}, 2, [[0, 1], [1, 1]]),
        ([0, 0, 0], {"classes": 2}, 2, [0, 0, 0]),
        ([10, 20, 50000], {"classes": 50001}, 50001, [10, 20, 50000]),
        (ALL, {"classes": 0, **TABLE}, None, ALL.tolist()),
        ([1, 2, 2], {"known": KnownClasses(None)}, None, [1, 2, 2]),
    ],
)
def test_targets_become_whole_numbers_of_classes_or_floats(targets, given, classes, found):
    seen = read(targets, **given)
    train = seen.parts["train"]
    assert (seen.classes, train.tolist()) == (classes, found)
    assert train.dtype == (np.float32 if classes is None else np.int64)


def test_texts_are_classes_in_sorted_order_over_all_parts():
    found = read(["dog", "cat", "ant"], test=["ant", "cat"])
    assert (found.classes, found.labels) == (3, ("ant", "cat", "dog"))
    assert [found.parts[part].tolist() for part in ("train", "test")] == [[2, 1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("targets", "given", "labels"),
    [
        ([0, 1], {"labels": ("a", "b", "c")}, ("a", "b", "c")),
        ([0, 3], {"labels": ("a", "b", "c")}, ()),
        ([[0.5, 1.0], [2.0, 3.5]], {"targets": ("low", "high")}, ("low", "high")),
        (ALL * 7, {"classes": 60, **TABLE}, tuple(range(0, 420, 7))),
    ],
)
def test_names_of_classes_and_targets_are_kept_if_they_fit(targets, given, labels):
    assert read(targets, **given).labels == labels


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


@pytest.mark.parametrize("names", [(), ("0", "1"), ("False", "True"), ("false", "true")])
@pytest.mark.parametrize(
    "targets", [[0, 1, 1], [0.0, 1.0, 1.0], [False, True, True], [[1, 0], [0, 1], [0, 1]]]
)
def test_labels_that_are_given_differently_are_met_again(names, targets):
    assert read(targets, known=KnownClasses(2, names)).parts["train"].tolist() == [0, 1, 1]


def test_codes_with_a_leading_zero_are_other_labels_than_numbers():
    with pytest.raises(BadData, match="class '01', but the model was trained on 1, 2"):
        read(["01", "02"], known=KnownClasses(2, ("1", "2")))
    with pytest.raises(BadData, match="class '0', but the model was trained on 3, 5"):
        read([0, 1], known=KnownClasses(2, ("3", "5")))


def test_a_class_without_a_name_is_no_missing_label():
    known = KnownClasses(2, ("", "cat"))
    assert read(["cat", "", "cat"], known=known).parts["train"].tolist() == [1, 0, 1]
    found = read([1, 0, -100], labels=("", "cat"), known=known)
    assert found.parts["train"].tolist() == [1, 0, -100]


@pytest.mark.parametrize(
    ("train", "others", "said"),
    [
        (["a", "b", "c"], {"classes": 2}, "3 different texts, .* but 2 classes"),
        ([["a", "b"], ["b", "a"]], {}, r"texts of shape \(2, 2\)"),
        (["a", "b"], {"classes": 0}, "texts, such as 'a', but numbers"),
        (["5 Jan", "5 Jan"], {"targets": ("t",)}, "the target 't' is '5 Jan' in every sample"),
        ([2.5, 2.5], {}, "is '2.5' in every sample"),
        ([True, True], {}, "is 'True' in every sample"),
        ([f"id {at}" for at in ALL], {}, r"60 different texts in 60 samples, such as 'id 0'"),
        (ALL, TABLE, r"60 different .* from 0 to 59.*--data\.classes none .*--data\.classes 60"),
        (ALL % 21, TABLE, "21 different whole numbers"),
        (ALL % 21 + 0.0, TABLE, "21 different whole numbers"),
        (ALL % 21 + 0.0, {}, "21 different whole numbers"),
        (np.repeat(ALL[:30] * 1000, 5), {}, "from 0 to 29,000"),
        (np.repeat(ALL[:30] * 1000, 5), TABLE, "from 0 to 29,000"),
        ([0.0, 1.5, 2.5], {"classes": 3}, r"2 labels that are no whole numbers: sample 1 has 1\.5"),
        ([[0, 1, 2], [1, 0, 0]], {}, r"of the shape \(2, 3\).*--data\.classes N"),
        ([0, 0, 0], {}, r"--data\.classes N"),
        (np.zeros((3, 0)), {}, r"shape \(3, 0\)"),
        ([1, -1, 0, -1], {}, r"2 labels outside 0\.\.1: sample 1 has -1"),
        ([0, 1], {"test": [0, 9, 10], "classes": 10}, r"test .* outside 0\.\.9: sample 2 has 10"),
        ([[0, 2], [1, 3], [0, 0]], {"classes": 3}, r"1 labels outside 0\.\.2: sample 1 has 3"),
        ([0.0, float("nan")], {}, "in 1 of 2 samples, first in sample 1"),
        ([1j, 2j], {}, "train targets are of type complex128"),
        ([-100, -100], {}, "no sample has a label"),
        (["dog", "ant"], {"known": PETS}, "class 'ant', but the model was trained on cat, cow, dog"),
        ([0, 1], {"labels": ("dog", "ant"), "known": PETS}, "the class 'ant'"),
        ([0, 3], {"known": PETS}, r"outside 0\.\.2: sample 1 has 3"),
        (["dog", "cow"], {"known": KnownClasses(None)}, "but the model was trained on numbers"),
    ],
)
def test_targets_that_fit_no_kind_are_refused(train, others, said):
    with pytest.raises((BadData, NotFinite), match=said):
        read(train, **others)
