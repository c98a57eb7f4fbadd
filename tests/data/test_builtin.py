"""The built-in data sets hold what their publishers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tutti.data.builtin import BUILT_IN


def test_digits_are_those_of_scikit_learn():
    bunch, parts = load_digits(), BUILT_IN["digits"]().parts
    inputs, targets = (np.concatenate([parts["train"][at], parts["test"][at]]) for at in (0, 1))
    found, wanted = (
        np.column_stack([inputs.reshape(-1, 64), targets]),
        np.column_stack([bunch.data, bunch.target]),
    )
    assert sorted(found.tolist()) == sorted(wanted.tolist())


def test_digits_have_a_fixed_stratified_test_part(opened):
    first, second = opened("digits", seed=0), opened("digits", seed=1)
    assert (len(first.train), len(first.validation), len(first.test)) == (1294, 144, 359)
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert not torch.equal(first.validation.inputs, second.validation.inputs)
    assert first.classes == 10
    assert first.shape == (1, 8, 8)
    counts = torch.bincount(first.test.targets)
    assert counts.max() - counts.min() <= 2


@pytest.mark.mnist
@pytest.mark.parametrize(
    ("name", "first", "label"),
    [("mnist", [5, 0, 4, 1, 9], "5"), ("fashion-mnist", [9, 0, 0, 3, 0], "Sandal")],
)
def test_published_data_sets_are_read_whole(real_data, opened, name, first, label):
    found = opened(name, validation=0)
    assert (len(found.train), len(found.test)) == (60000, 10000)
    assert found.train.inputs.dtype == torch.uint8
    assert found.train.targets[:5].tolist() == first
    assert found.shape == (1, 28, 28)
    assert found.labels[5] == label
