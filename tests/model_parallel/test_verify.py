"""`tutti verify` says yes to every layout of a model, and no where one computes something else."""

from __future__ import annotations

import pickle

import pytest

from tests.comm.ranks import World
from tests.model_parallel.runs import LENET, MLP, Run
from tutti.cli.main import main
from tutti.comm.base import Communicator
from tutti.run.config import TrainConfig
from tutti.studies.verify.follow import work
from tutti.studies.verify.tolerance import Verdict, VerifyJob

FINE: Run = {"clip_value": 0.05, "validation": 0.0}
NORMALISED: Run = MLP | FINE | {"model": "tests.model_parallel.models:normalised", "model_options": {}}
DROPPING: Run = MLP | FINE | {"model_options": {"hidden": [16], "dropout": 0.3}}

TWO: dict[str, Run] = {
    "tensor": LENET | FINE | {"parallel": "tensor", "clip_norm": 0.1},
    "pipeline": LENET | FINE | {"parallel": "pipeline", "clip_norm": 0.1},
    "sharded": LENET | FINE | {"parallel": "sharded", "clip_norm": 0.1, "batch_size": 15},
    "dropout, sharded": DROPPING | {"parallel": "sharded", "batch_size": 15},
    "norm, tensor": NORMALISED | {"parallel": "tensor"},
}


def verify_all(comm: Communicator, runs: dict[str, Run]) -> dict[str, Verdict]:
    """Compare one run after the other."""
    jobs = {name: VerifyJob(TrainConfig.from_json(run), "float64") for name, run in runs.items()}
    return {name: work(comm, pickle.dumps(job)) for name, job in jobs.items()}


@pytest.mark.timeout(300)
def test_every_layout_follows_sequential_training_in_float64() -> None:
    with World(2) as world:
        found = world.run(verify_all, TWO)[0]
    for name, verdict in found.items():
        largest = {key: one.found.largest for key, one in verdict.deviations.items()}
        assert verdict.follows, (name, largest)
        assert max(largest.values()) < 1e-12, (name, largest)


@pytest.mark.timeout(300)
def test_microbatches_of_a_pipeline_make_layers_differ_and_it_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, data = "tests.model_parallel.models:dropped", "tests.model_parallel.runs:images"
    assert main(["verify", model, "--data", data, "--steps", "2", "--parallel", "pipeline=2"]) == 1
    shown = capfd.readouterr().out
    assert "BatchNorm ('1')" in shown
    assert "Dropout ('2')" in shown
