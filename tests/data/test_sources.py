"""What `data` may be: names, factories, arrays, tensors, pairs and dicts; anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tutti.data.contents import with_weights
from tutti.errors import BadData, NotFinite, UserError

FACTORIES = """
import numpy as np

def arrays(count=30, classes=3):
    return np.arange(count * 2.0).reshape(count, 2), np.arange(count) % classes

def pair():
    return arrays(20), arrays(10)

def nothing():
    return None
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "sets.py").write_text(FACTORIES)
    return lambda name: f"{tmp_path}/sets.py:{name}"


@pytest.mark.parametrize(
    ("name", "options", "samples", "classes"),
    [
        ("arrays", {"count": 12, "classes": 4}, 12, 4),
        ("pair", {}, 20, 3),
        ("pair", {"classes": 7}, 20, 7),  # which the factory does not take
    ],
)
def test_a_factory_is_called_with_the_options(opened, factory, name, options, samples, classes):
    found = opened(factory(name), validation=0, options=options)
    assert (found.name, len(found.train), found.classes) == (name, samples, classes)
    assert (found.test is None) is (name == "arrays")


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        ("sets.py:arrays", {"cont": 3}, r"unknown option 'cont' of the data set .*; did you mean 'count'"),
        ("sets.py:nothing", {}, r"what '.*sets.py:nothing' returned is a NoneType; give \(x, y\)"),
        ("minst", {}, "unknown data set 'minst'; did you mean 'mnist'"),
        ("digits", {"class": 10}, "unknown option 'class' of the data; did you mean 'classes'"),
        ("digits", {"classes": "ten"}, r"--data\.classes is 'ten'; give a whole number"),
    ],
)
def test_names_and_options_that_are_unknown_are_refused(opened, factory, data, options, said):
    kind, _, name = data.partition(":")
    with pytest.raises(UserError, match=said):
        opened(factory(name) if name else kind, options=options)


def test_built_in_data_take_the_number_of_classes(opened):
    assert opened("digits", options={"classes": 12}).classes == 12


def test_lists_arrays_and_tensors_are_taken(opened):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    for data in ((x.tolist(), y.tolist()), (x, y), (torch.tensor(x), torch.tensor(y)), [x, y]):
        found = opened(data, validation=0)
        assert found.name == "arrays"
        assert found.train.inputs.dtype == torch.float32
        assert found.train.inputs.tolist() == x.tolist()
        assert found.train.targets.dtype == torch.int64
        assert found.train.targets.tolist() == y.tolist()


def test_a_dict_has_the_keys_of_an_npz_file(opened):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    found = opened({"data": x, "target": y, "target_names": np.array(["no", "yes"])}, validation=0)
    assert found.labels == ("no", "yes")
    assert opened({"x": x, "y": y, "test_x": x[:2], "test_y": y[:2], "classes": 5}).classes == 5
    with pytest.raises(BadData, match="the data lacks the test targets; keys found: x, y, x_test"):
        opened({"x": x, "y": y, "x_test": x})


PAIRS, KINDS = np.arange(24.0).reshape(12, 2), np.arange(12) % 3
HEAVY = np.arange(12.0)


@pytest.mark.parametrize(
    "data",
    [
        {
            "x": PAIRS,
            "y": KINDS,
            "w": HEAVY,
            "x_test": PAIRS,
            "y_test": KINDS,
            "test_weight": HEAVY[:, None] * 2,
        },
        with_weights(((PAIRS, KINDS), (PAIRS, KINDS)), HEAVY.tolist()),
        with_weights({"x": PAIRS, "y": KINDS}, torch.tensor(HEAVY)),
    ],
)
def test_weights_of_samples_follow_their_rows(opened, data):
    found = opened(data, validation=0.5)
    for part in (found.train, found.validation):
        weights = part.weights_of(torch.arange(len(part)))
        assert len(part) == 6
        assert torch.equal(weights * 2, part.inputs[:, 0].double())
    if "test_weight" in data:
        assert found.test.stored_weights.tolist() == (HEAVY * 2).tolist()


def test_weights_of_samples_with_missing_values_are_left_out(opened):
    holes = np.where(HEAVY[:, None] == [[3.0, 5.0]], np.nan, PAIRS)
    found = opened({"x": holes, "y": KINDS, "w": HEAVY}, validation=0, options={"missing": "drop"})
    assert found.train.stored_weights.tolist() == [0, 1, 2, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (HEAVY - 1, "sample 0 is -1"),
        (np.where(HEAVY == 4, np.nan, HEAVY), "sample 4 is nan"),
        (HEAVY * 0, "sample 0 is 0"),
        (HEAVY[1:], r"one number for each of 12"),
        (KINDS.astype(str), r"one number for each of 12"),
    ],
)
def test_what_is_no_weight_of_each_sample_is_refused(opened, weights, named):
    with pytest.raises(BadData, match=named):
        opened({"x": PAIRS, "y": KINDS, "w": weights})


def test_texts_that_are_objects_are_classes(opened):
    x, texts = np.arange(8.0).reshape(4, 2), np.array(["dog", "cat", "cat", "dog"])
    found = opened((x, texts.astype(object)), validation=0)
    assert found.labels == ("cat", "dog")
    assert found.train.targets.tolist() == [1, 0, 0, 1]


def test_kinds_of_inputs_are_kept_as_promised(opened):
    y = np.arange(8) % 2
    kinds = {
        "uint8": torch.uint8,
        "int32": torch.int64,
        "uint16": torch.int64,
        "float16": torch.float32,
        "bool": torch.float32,
    }
    for kind, kept in kinds.items():
        assert opened((np.ones((8, 3), kind), y)).train.inputs.dtype == kept
    assert opened((torch.ones(8, 3, dtype=torch.bfloat16), y)).train.inputs.dtype == torch.float32


def test_images_get_channels_first(opened):
    y = np.arange(8) % 2
    assert opened((np.zeros((8, 6, 5), np.uint8), y)).shape == (1, 6, 5)
    assert opened((torch.zeros(8, 6, 5, dtype=torch.uint8), y)).shape == (1, 6, 5)
    assert opened((np.zeros((8, 6, 5, 3), np.float32), y)).shape == (3, 6, 5)
    assert opened((np.zeros((8, 3, 6, 5), np.uint8), y)).shape == (3, 6, 5)
    assert opened((np.zeros((8, 6, 5)), y)).shape == (6, 5)
    assert opened((np.zeros(8), y)).shape == (1,)


Y = np.zeros(4, int)
BROKEN = np.zeros((50, 3, 4))
BROKEN[[7, 30, 31], 2, 1] = np.nan, np.inf, 1e300


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, r"the data is a NoneType; give \(x, y\)"),
        ((1, 2, 3), r"the data is a tuple of 3; give \(x, y\)"),
        ((np.zeros((5, 2)), Y), r"5 inputs but 4 targets"),
        ((np.zeros((0, 2)), Y[:0]), "the train part has no samples"),
        ((3.0, 1), "the train part is a single value"),
        ((np.zeros((4, 0)), Y), r"shape \(4, 0\)"),
        (([[1, 2], 3], [0, 1]), "the train inputs are no regular array"),
        (([[1, 2], [3, 4]], [[0], [0, 1]]), "the train targets are no regular array"),
        ((np.array([{}, {}], dtype=object), [0, 1]), "the train inputs are Python objects"),
        ((np.array(["a", "b"]), [0, 1]), "the train inputs are of type <U1"),
        ((BROKEN, np.arange(50) % 2), "train inputs hold .* in 3 of 50 samples, first in sample 7;"),
        (((BROKEN[:5], np.arange(5) % 2), (BROKEN, np.arange(50) % 2)), "test inputs hold"),
        (((np.zeros((4, 2)), Y), (np.zeros((4, 3)), Y)), r"test .* \(4, 3\).*train inputs \(4, 2\)"),
        (((np.zeros((4, 2)), Y), (np.zeros((4, 2), np.uint8), Y)), "test inputs have .* type uint8"),
        (
            ((np.zeros((4, 2)), np.zeros((4, 1))), (np.zeros((4, 2)), np.zeros((4, 2)))),
            r"test targets have the shape \(4, 2\), the train targets \(4, 1\)",
        ),
    ],
)
def test_data_that_cannot_be_used_are_refused(opened, data, said):
    with pytest.raises((BadData, NotFinite), match=said):
        opened(data)
