"""Other data are seen by a model as those that it was trained on."""

from __future__ import annotations

import pytest
import torch

from tutti.data import DataSet, Part
from tutti.errors import BadData
from tutti.records.run_folder import TrainedOn
from tutti.run.evaluate import seen_as

TRAINED = TrainedOn("pets", 3, ("cat", "cow", "dog"), (2,), (), (), 3, fill=(5.0, 6.0))


def data_of(labels, numbers):
    inputs = torch.tensor([[float("nan"), 1.0]] * len(numbers))
    return DataSet("others", Part(inputs, torch.tensor(numbers)), None, None, len(labels), labels)


def test_classes_have_the_numbers_that_their_names_had_in_training():
    seen = seen_as(data_of(("cow", "dog"), [0, 1, -100, 0]), TRAINED)
    assert seen.train.targets.tolist() == [1, 2, -100, 1]
    assert (seen.classes, seen.labels) == (3, TRAINED.labels)


def test_a_class_that_training_did_not_have_is_refused():
    with pytest.raises(BadData, match="has the class 'ant', but the model was trained on cat, cow, dog"):
        seen_as(data_of(("ant", "dog"), [0, 1]), TRAINED)


def test_missing_values_become_the_means_of_training():
    seen = seen_as(data_of(("cat", "cow"), [0, 1]), TRAINED)
    assert seen.train.take(torch.tensor([1]))[0].tolist() == [[5, 1]]
