"""A run that goes on from its middle, on any number of ranks, is the run that was never interrupted."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

from tests.states import saved_by
from tests.trainers import trainer_by
from tests.training.blobs import blobs
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Part
from tutti.optim.state import load
from tutti.records.run import EpochRecord
from tutti.run.restore import load_model
from tutti.state import Saved, State
from tutti.strategies import Clip, Sync
from tutti.training.agenda import Agenda, Wishes
from tutti.training.intervals import Every
from tutti.training.metrics import METRICS, Metric

EPOCHS, UPDATES, MIDDLE = 3, 7, 10


def doubles(part: Part) -> Part:
    return replace(part, stored_inputs=part.inputs.double())


TRAIN, VALIDATION = doubles(blobs(205)), doubles(blobs(61, seed=4))


def network(norm: bool) -> nn.Module:
    middle = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
    layers = nn.Linear(12, 16), middle, nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class Finished:
    """What one rank has in the end.

    Attributes:
        weights: and buffers, by name.
        records: of all epochs.
        state: of this rank in the middle; None: it was not asked for.
    """

    weights: dict[str, Tensor]
    records: list[EpochRecord]
    state: State | None


# Each row of all ranks, once.
SEEN = Metric(name="seen", function=lambda one, its: len(one) + 1000 * int(its.sum()), width=0)


def run(
    ranks: int, norm: bool, validate: str = "pause", keeps: bool = False, saved: list[Saved] | None = None
) -> list[Finished]:
    """Train from the beginning, or from where others were."""

    def program(comm: Communicator) -> Finished:
        torch.manual_seed(0 if saved is None else 99 + comm.rank)
        module, states = network(norm), []
        optimizer = Adam(module.parameters(), lr=0.01)
        schedule = OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * UPDATES)
        mine = None if saved is None else saved[comm.rank]
        if mine is not None:
            load_model(module, mine)
            names = {parameter: name for name, parameter in module.named_parameters()}
            load(optimizer, names, mine, (mine.own or mine.shared)["training"]["schedule"]["options"])
        agenda = Agenda(comm, Wishes(Every(steps=MIDDLE), now=lambda: 0.0)) if keeps else None
        objective = {"metrics": [METRICS["accuracy"], SEEN], "classes": 4}
        trainer = trainer_by(
            *(Sync(), comm, module, optimizer, TRAIN, 30, Clip(norm=0.5)),
            **objective,
            epochs=EPOCHS,
            scheduler=schedule,
            validation=VALIDATION,
            validate=validate,
            agenda=agenda,
            save=lambda _, state, __: states.append(deepcopy(state)),
        )
        records = trainer.fit(mine)
        return Finished(deepcopy(module.state_dict()), records, states[0] if states else None)

    found: list[Finished] = VirtualWorld(ranks).run(program)
    return found


uninterrupted = cache(run)


def compare(expected: list[EpochRecord], found: list[EpochRecord]) -> None:
    """Hold the records of a run to those of another, up to rounding."""
    for one, other in zip(expected, found, strict=True):
        assert (one.epoch, one.step, one.complete) == (other.epoch, other.step, other.complete)
        assert one.lr == pytest.approx(other.lr, rel=1e-12)
        for here, there in ((one.train, other.train), (one.validation, other.validation)):
            assert here is not None
            assert there is not None
            assert replace(here, loss=0.0) == replace(there, loss=0.0)
            assert here.loss == pytest.approx(there.loss, rel=1e-12)


@pytest.mark.parametrize(("norm", "validate"), [(False, "pause"), (True, "background")])
def test_as_many_ranks_end_bit_by_bit_where_they_would_have(norm: bool, validate: str) -> None:
    expected = uninterrupted(2, norm)
    kept = run(2, norm, validate, keeps=True)
    states = [one.state for one in kept if one.state is not None]
    resumed = run(2, norm, validate, saved=saved_by(states))
    assert len(states) == 2
    for one, saving, other in zip(expected, kept, resumed, strict=True):
        for found in (saving, other):
            assert all(torch.equal(found.weights[name], kept) for name, kept in one.weights.items())
            assert [record.train for record in found.records] == [record.train for record in one.records]
            compare(one.records, found.records)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_end_there_but_for_rounding(ranks: int) -> None:
    expected = uninterrupted(2, False)[0]
    states = [one.state for one in run(2, False, keeps=True) if one.state is not None]
    for found in run(ranks, False, saved=saved_by(states, ranks)):
        for name, weights in expected.weights.items():
            assert (found.weights[name] - weights).norm() <= 1e-12 * weights.norm()
        compare(expected.records, found.records)
