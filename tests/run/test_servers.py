"""Runs with servers: refused where they do not fit, and else trained as without them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import tutti
from tutti.comm.virtual.world import VirtualWorld
from tutti.run.checks import check_recipe
from tutti.run.config import TrainConfig
from tutti.run.train import work
from tutti.run.train_job import RunOutcome, TrainJob

pytestmark = pytest.mark.usefixtures("nothing_beside")


def job(**options: Any) -> TrainJob:
    """A short run that prints and writes nothing."""
    common = {"data": "digits", "model_options": {"hidden": [16]}, "lr": 0.01, "epochs": 1, "batch_size": 32}
    return TrainJob(TrainConfig(**{**common, **options}), quiet=True, write=False, bring_weights=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "sync", "servers": 1}, "'sync' has no parameter centre"),
        ({"servers": 1}, "leave --servers out"),
        ({"strategy": "paramserver", "servers": 1, "levels": 2}, "--levels 1"),
        ({"strategy": "downpour"}, "--servers 1"),
    ],
)
def test_a_strategy_that_does_not_fit_servers_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tutti.UserError) as caught:
        check_recipe(job(**options), 3, hosts=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"strategy": "downpour", "servers": 1}, {"strategy": "easgd", "servers": 2, "levels": 2}]
)
def test_virtual_workers_train_with_servers_and_agree(options: dict[str, Any]) -> None:
    count = options["servers"]
    world = VirtualWorld(2 + count, ranks_per_host=2)
    outcomes = world.run(work, pickle.dumps(job(**options)))
    assert all(isinstance(outcome, RunOutcome) for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.config.workers == "2"
        assert (outcome.config.servers, outcome.summary.world.ranks) == (count, 2)
        assert outcome.weights is not None
        assert outcomes[0].weights is not None
        for name, tensor in outcome.weights.items():
            assert tensor.equal(outcomes[0].weights[name])


def test_a_server_learns_what_the_centre_in_shared_memory_learns() -> None:
    options = {"strategy": "downpour", "optimizer": "sgd", "lr": 0.1, "epochs": 3, "precision": "fp64"}
    served = VirtualWorld(2).run(work, pickle.dumps(job(**options, servers=1)))[0]
    shared = VirtualWorld(1).run(work, pickle.dumps(job(**options)))[0]
    assert served.weights is not None
    assert shared.weights is not None
    for name, tensor in served.weights.items():
        assert tensor.allclose(shared.weights[name], rtol=1e-12, atol=1e-12)
