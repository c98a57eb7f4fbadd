"""Predictions: each sample once, in order, the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.training.blobs import blobs, model
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Part
from tutti.training import prediction
from tutti.training.precision import FP32
from tutti.training.prediction import predict, predictions_of


@pytest.mark.parametrize("samples", [1, 61, 64])
def test_predictions_are_the_same_bits_on_any_number_of_ranks(monkeypatch, samples):
    monkeypatch.setattr(prediction, "PASS", 8)
    part, module = blobs(samples), model(norm=True).eval()
    with torch.no_grad():
        wanted = torch.cat([module(inputs) for inputs in part.inputs.split(8)])
    module.train()
    for ranks in (1, 2, 3, 5, 11):
        found, *others = VirtualWorld(ranks).run(lambda comm: predict(module, part, comm, FP32))
        assert others == [None] * (ranks - 1)
        assert torch.equal(found, wanted)
    assert module.training


def test_predictions_have_the_numbers_of_the_samples():
    whole, rows = blobs(20), torch.tensor([2, 3, 5, 19])
    some = Part(whole.stored_inputs, whole.stored_targets, rows=rows)
    found = predictions_of(some, torch.zeros(4, 3))
    assert found.rows.tolist() == [2, 3, 5, 19]
    assert found.targets.tolist() == whole.targets[rows].tolist()
    assert predictions_of(whole, torch.zeros(20, 3)).rows.tolist() == list(range(20))
