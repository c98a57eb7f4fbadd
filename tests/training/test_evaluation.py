"""Evaluation: each sample once, whatever the number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.nn import functional

from tests.training.blobs import blobs
from tests.training.blobs import model as small
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.parts import Part
from tutti.records.run import Evaluation
from tutti.replica import Replica
from tutti.training import prediction
from tutti.training.evaluation import (
    Objective,
    average_buffers,
    evaluate,
    evaluating,
)
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS, own_metric
from tutti.training.precision import FP32
from tutti.training.prediction import predict, predictions_of
from tutti.training.targets import CLASSES, Reading

GENERATOR = torch.Generator().manual_seed(1)
PART = Part(
    torch.randn(10_007, 20, generator=GENERATOR), torch.randint(0, 10, (10_007,), generator=GENERATOR)
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


def evaluation_on(ranks: int, part: Part = PART) -> list[Evaluation]:
    module = model()

    def program(comm: Communicator) -> Evaluation:
        mine, metrics = copy.deepcopy(module), [METRICS["accuracy"]]
        return evaluate(
            mine, part, comm, Objective(LOSSES["cross_entropy"], metrics, 10), batch_size=300
        ).total(comm)

    return VirtualWorld(ranks).run(program)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_sample_counts_once_at_any_world_size(ranks: int) -> None:
    module = model().eval()
    with torch.no_grad():
        outputs = module(PART.inputs)
    first, *others = evaluation_on(ranks)
    assert all(other == first for other in others)
    assert first.samples == 10_007
    assert first.confusion == confusion_matrix(PART.targets, outputs.argmax(1)).tolist()
    assert first.metrics["accuracy"] == (outputs.argmax(1) == PART.targets).sum().item() / 10_007
    expected = functional.cross_entropy(outputs.double(), PART.targets).item()
    assert first.loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_an_output_is_nan_no_metric_has_a_figure(ranks: int) -> None:
    inputs = PART.inputs[:50].clone()
    inputs[7, 3] = torch.nan
    part = Part(inputs, PART.targets[:50])
    names = ["accuracy", "f1", "auc"]
    reading = Reading(CLASSES, 10, "cross_entropy", False, part.targets)
    metrics = [METRICS[name].on(reading) for name in names]
    metrics.append(own_metric(lambda y_true, y_pred: 1.0, "mine", reading))

    def program(comm: Communicator) -> Evaluation:
        objective = Objective(LOSSES["cross_entropy"], metrics, 10)
        return evaluate(model(), part, comm, objective, batch_size=300).total(comm)

    found = VirtualWorld(ranks).run(program)[0]
    assert all(value != value for value in found.metrics.values())
    assert [*found.metrics] == [*names, "mine"]
    assert found.confusion is not None
    assert sum(row[10] for row in found.confusion) == 1


def test_every_part_of_a_model_is_in_its_own_mode_afterwards() -> None:
    module = model()
    module[1].eval()
    modes = [part.training for part in module.modules()]
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == modes


def test_statistics_become_the_mean_over_the_ranks_constants_stay_exact_and_counts_are_rank_0_s() -> None:
    def program(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        module = nn.BatchNorm1d(3)
        module.register_buffer("constant", torch.full((4,), 0.1))
        module.register_buffer("mask", torch.full((2,), torch.finfo(torch.float64).min, dtype=torch.float64))
        module.register_buffer("graph", torch.eye(3).to_sparse())
        replica = Replica(module)
        module.running_mean.fill_(comm.rank)
        module.num_batches_tracked.fill_(7 - comm.rank)
        average_buffers(replica, comm)
        assert (module.mask == torch.finfo(torch.float64).min).all()
        return module.running_mean, module.constant, module.num_batches_tracked.item()

    for mean, constant, tracked in VirtualWorld(3).run(program):
        assert torch.equal(mean, torch.ones(3))
        assert torch.equal(constant, torch.full((4,), 0.1))
        assert tracked == 7


@pytest.mark.parametrize("samples", [1, 61, 64])
def test_predictions_are_the_same_bits_on_any_number_of_ranks(monkeypatch, samples):
    monkeypatch.setattr(prediction, "PASS", 8)
    part, module = blobs(samples), small(norm=True).eval()
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


def test_each_member_of_an_ensemble_has_a_loss_of_its_own() -> None:
    members = torch.tensor([[[1.0], [5.0]], [[3.0], [1.0]]])

    def ensemble(_: object) -> dict[str, object]:
        return {"logits": members.mean(0), "members": members.unbind()}

    found = Objective(LOSSES["mse"]).compute(ensemble, members[0], torch.tensor([2.0, 2.0]))
    assert found.outputs.tolist() == [[2.0], [3.0]]
    assert (float(found.loss), found.weight) == ((1 + 9 + 1 + 1) / 4, 2)
