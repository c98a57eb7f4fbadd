"""Other data are seen by a model as those that it was trained on."""

from __future__ import annotations

import torch

from tutti.data import DataSet, Part
from tutti.records.run_folder import TrainedOn
from tutti.run.evaluate import seen_as

TRAINED = TrainedOn("pets", 3, ("cat", "cow", "dog"), (2,), (), (), 3, fill=(5.0, 6.0))


def data_of(labels, numbers):
    inputs = torch.tensor([[float("nan"), 1.0]] * len(numbers))
    return DataSet("others", Part(inputs, torch.tensor(numbers)), None, None, len(labels), labels)


def test_missing_values_become_the_means_of_training():
    seen = seen_as(data_of(("cat", "cow"), [0, 1]), TRAINED)
    assert seen.train.take(torch.tensor([1]))[0].tolist() == [[5, 1]]
