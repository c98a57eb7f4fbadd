"""What `data` may be: names, factories, arrays, tensors, pairs and dicts; anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tutti.errors import BadData, BadOption, NotFinite, UnknownName

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


def test_a_factory_is_called_with_the_options(opened, factory):
    found = opened(factory("arrays"), validation=0, options={"count": 12, "classes": 4})
    assert found.name == "arrays"
    assert len(found.train) == 12
    assert found.classes == 4


def test_a_factory_may_give_train_and_test(opened, factory):
    found = opened(factory("pair"), validation=0)
    assert (len(found.train), len(found.test)) == (20, 10)


def test_classes_may_be_given_to_data_whose_factory_does_not_take_it(opened, factory):
    assert opened(factory("pair"), options={"classes": 7}).classes == 7


def test_an_unknown_option_of_a_factory_is_refused(opened, factory):
    with pytest.raises(UnknownName, match=r"unknown option 'cont' of the data set .*; did you mean 'count'"):
        opened(factory("arrays"), options={"cont": 3})


def test_a_factory_that_gives_something_else_is_refused(opened, factory):
    with pytest.raises(BadData, match=r"what '.*sets.py:nothing' returned is a NoneType; give \(x, y\)"):
        opened(factory("nothing"))


def test_an_unknown_name_proposes_the_nearest(opened):
    with pytest.raises(UnknownName, match="unknown data set 'minst'; did you mean 'mnist'"):
        opened("minst")


def test_built_in_data_take_no_options_but_classes(opened):
    assert opened("digits", options={"classes": 12}).classes == 12
    with pytest.raises(UnknownName, match="unknown option 'class' of the data; did you mean 'classes'"):
        opened("digits", options={"class": 10})
    with pytest.raises(BadOption, match=r"--data\.classes is 'ten'; give a whole number"):
        opened("digits", options={"classes": "ten"})


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


@pytest.mark.parametrize("data", [None, 7, (1, 2, 3)])
def test_other_objects_are_refused(opened, data):
    with pytest.raises(BadData, match=r"the data is a .*; give \(x, y\)"):
        opened(data)


def test_unequal_lengths_are_refused(opened):
    with pytest.raises(BadData, match=r"5 inputs \(shape \(5, 2\)\) but 4 targets"):
        opened((np.zeros((5, 2)), np.zeros(4, int)))


def test_no_samples_single_values_and_empty_inputs_are_refused(opened):
    with pytest.raises(BadData, match="the train part has no samples"):
        opened((np.zeros((0, 2)), np.zeros(0, int)))
    with pytest.raises(BadData, match="the train part is a single value"):
        opened((3.0, 1))
    with pytest.raises(BadData, match=r"have the shape \(4, 0\)"):
        opened((np.zeros((4, 0)), np.zeros(4, int)))


def test_texts_that_are_objects_are_classes(opened):
    x, texts = np.arange(8.0).reshape(4, 2), np.array(["dog", "cat", "cat", "dog"])
    found = opened((x, texts.astype(object)), validation=0)
    assert found.labels == ("cat", "dog")
    assert found.train.targets.tolist() == [1, 0, 0, 1]


def test_ragged_object_and_text_inputs_are_refused(opened):
    with pytest.raises(BadData, match="the train inputs are no regular array"):
        opened(([[1, 2], 3], [0, 1]))
    with pytest.raises(BadData, match="the train targets are no regular array"):
        opened(([[1, 2], [3, 4]], [[0], [0, 1]]))
    with pytest.raises(BadData, match="the train inputs are Python objects"):
        opened((np.array([{}, {}], dtype=object), [0, 1]))
    with pytest.raises(BadData, match="the train inputs are of type <U1; give numbers"):
        opened((np.array(["a", "b"]), [0, 1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_the_first_named(opened, bad):
    x = np.zeros((50, 3, 4))
    x[[7, 30, 31], 2, 1] = bad
    x_test = np.zeros((5, 3, 4))
    with pytest.raises(
        NotFinite, match=r"train inputs hold NaN or inf .* in 3 of 50 samples, first in sample 7;"
    ):
        opened((x, np.zeros(50, int)))
    with pytest.raises(NotFinite, match="test inputs hold"):
        opened(((x_test, np.zeros(5, int)), (x, np.zeros(50, int))))


def test_parts_that_do_not_fit_together_are_refused(opened):
    y = np.zeros(4, int)
    with pytest.raises(BadData, match=r"test inputs have the shape \(4, 3\).*train inputs \(4, 2\)"):
        opened(((np.zeros((4, 2)), y), (np.zeros((4, 3)), y)))
    with pytest.raises(BadData, match=r"test inputs have the shape .* type uint8.*and float64"):
        opened(((np.zeros((4, 2)), y), (np.zeros((4, 2), np.uint8), y)))
    with pytest.raises(BadData, match=r"test targets have the shape \(4, 2\), the train targets \(4, 1\)"):
        opened(((np.zeros((4, 2)), np.zeros((4, 1))), (np.zeros((4, 2)), np.zeros((4, 2)))))


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
