"""Amounts in their own units: trained in standard deviations, reported as they are."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from tests.trainers import trainer_of
from tests.training.test_cuda_graph import Late, Replaying
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import BadModel
from tutti.strategies import Clip, Sync
from tutti.strategies.placement import place
from tutti.training.cuda_graph import GraphedPass
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES, Loss
from tutti.training.losses.units import Units, is_distance
from tutti.training.metrics import METRICS

UNITS = Units((1000.0, -3.0), (50.0, 0.1))


def amounts() -> tuple[Part, Part]:
    """Two amounts of each sample, in their units and in standard deviations."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(70, 4, generator=generator, dtype=torch.float64)
    targets = inputs[:, :2] + torch.randn(70, 2, generator=generator, dtype=torch.float64)
    part = Part(inputs, UNITS.outputs(targets))
    return part, Part(inputs, UNITS.standardised(part.stored_targets))


def trained(part: Part, loss: Loss, ranks: int = 1, passes: int = 1, graph: bool = False) -> tuple:
    """Return the history and the final weights."""

    def program(comm):
        torch.manual_seed(0)
        replica = place(
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), comm, Sync().home
        )
        optimizer = SGD(replica.module.parameters(), lr=0.1)
        batches = Batches(part, 20, comm.rank, comm.size, passes, seed=5)
        arithmetic = Late("fp64")
        objective = Objective(loss, [METRICS["mae"]], arithmetic=arithmetic)
        compute = GraphedPass(replica, batches, objective, Replaying(replica)) if graph else None
        history = trainer_of(
            comm=comm,
            replica=replica,
            worker=Sync().worker(replica, comm, optimizer, Clip()),
            optimizer=optimizer,
            batches=batches,
            loss=loss,
            metrics=objective.metrics,
            arithmetic=arithmetic,
            compute=compute,
            epochs=3,
            validation=part,
        ).fit()
        return history, copy.deepcopy(replica.module)

    return VirtualWorld(ranks).run(program)[0]


@pytest.mark.parametrize("name", ["mse", "l1"])
@pytest.mark.parametrize(
    "way", [{}, {"ranks": 3}, {"passes": 2}, {"graph": True}], ids=["solo", "sync", "accumulated", "graph"]
)
def test_training_follows_that_on_standardised_targets_and_reports_in_units(name: str, way: dict) -> None:
    part, scaled = amounts()
    history, module = trained(part, replace(LOSSES[name], units=UNITS), **way)
    _, wanted = trained(scaled, LOSSES[name])
    for own, its in zip(module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        outputs = UNITS.outputs(module(part.stored_inputs))
    found = history[-1].validation
    function = {"mse": functional.mse_loss, "l1": functional.l1_loss}[name]
    assert found.loss == pytest.approx(function(outputs, part.targets).item(), rel=1e-12)
    assert found.metrics["mae"] == pytest.approx(functional.l1_loss(outputs, part.targets).item(), rel=1e-12)
    assert history[0].train.loss > 10  # in units, too


def test_a_model_of_other_outputs_is_refused() -> None:
    with pytest.raises(BadModel, match="2 numbers"):
        UNITS.outputs(torch.zeros(7, 3))


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@pytest.mark.parametrize(
    ("function", "scaled"),
    [
        (functional.l1_loss, True),
        (partial(functional.huber_loss, delta=2.0), True),
        (nn.SmoothL1Loss(), True),
        (functional.poisson_nll_loss, False),
        (nn.GaussianNLLLoss(), False),
        (own, False),
    ],
)
def test_losses_of_distances_are_scaled_and_those_that_know_a_unit_are_not(function, scaled: bool) -> None:
    assert is_distance(function) is scaled
