"""A model that ranks hold together learns what the undivided model learns, in every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.model_parallel.runs import (
    CNN,
    HEAVY,
    LENET,
    MLP,
    TOLERANCE,
    WEIGHED,
    Found,
    Run,
    alone,
    deviation,
    on_ranks,
)
from tutti.data.parts import Part
from tutti.errors import BadOption
from tutti.model_parallel.base import Workload
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.pipeline import divide
from tutti.records.pipeline import SCHEDULES
from tutti.training.losses import LOSSES
from tutti.training.precision import FP32

pytestmark = pytest.mark.timeout(300)

MODELS = "tests.model_parallel.models"
ADAM: Run = {"optimizer": "adam", "optimizer_options": {}, "lr": 0.01}
CLIPPED: Run = {"clip_norm": 0.1, "clip_value": 0.05}
DEEP: Run = MLP | {"model_options": {"hidden": [24, 18, 16, 14, 12]}}


def own(name: str) -> Run:
    """A model of the tests."""
    return MLP | {"model": f"{MODELS}:{name}", "model_options": {}}


TENSOR: dict[str, Run] = {
    "mlp": MLP,
    "lenet": LENET,
    "cnn, one step": CNN | {"steps": 1, "lr": 1.0},
    "adam": MLP | ADAM,
    "weighed": LENET | HEAVY,
    "clipped": LENET | CLIPPED,
    "norm": own("normalised"),
    "tied": own("tied"),
    "dropped, channels last": own("dropped") | {"layout": "channels_last"},
}
SHARDED: dict[str, Run] = {
    "lenet": LENET,
    "adam": MLP | ADAM,
    "weighed": LENET | HEAVY,
    "clipped": LENET | CLIPPED,
    "fewer samples than ranks": MLP | {"batch_size": 66, "steps": 4},
    "fewer samples than ranks, weighed": MLP | HEAVY | {"batch_size": 66, "steps": 4},
    "grouped": own("grouped"),
    "tied": own("tied"),
    "looks at whole parameters": MLP | {"optimizer": f"{MODELS}:Normalised", "optimizer_options": {}},
}
PIPELINE: dict[str, Run] = {
    "cnn": CNN,
    "adam": DEEP | ADAM,
    "weighed": LENET | WEIGHED | {"parallel_options": {"microbatches": 6}},
    "clipped": LENET | CLIPPED,
    "residual": own("ResidualNet"),
    "encoder": own("Encoder"),
    # 16 samples in 6 microbatches leave something over.
    **{name: DEEP | {"parallel_options": {"schedule": name, "microbatches": 6}} for name in SCHEDULES},
}
WAYS = {"tensor": TENSOR, "sharded": SHARDED, "pipeline": PIPELINE}
BY_THREE: dict[str, Run] = {
    f"{way}: {name}": {**run, "parallel": way} for way, runs in WAYS.items() for name, run in runs.items()
}
"""By three ranks, over which little is cut evenly; one has neither the first layer nor the last."""

BY_FOUR: dict[str, Run] = {
    **{way: LENET | CLIPPED | {"parallel": f"data=2,{way}=2"} for way in ("tensor", "sharded", "pipeline")},
    # A normalisation is whole on every rank of a team, and must count once.
    "norm": own("layer_normalised") | CLIPPED | {"parallel": "data=2,tensor=2"},
    "ring": LENET
    | CLIPPED
    | {"parallel": "data=2,tensor=2", "strategy": "sync", "strategy_options": {"collective": "ring"}},
}
"""By two teams of two, each with samples of its own."""

RUNS = {3: BY_THREE, 4: BY_FOUR}


@pytest.fixture(scope="module")
def trained() -> Callable[[int], dict[str, Found]]:
    return cache(lambda ranks: on_ranks(ranks, RUNS[ranks]))


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, runs in RUNS.items() for name in runs])
def test_a_run_follows_the_undivided_model(
    trained: Callable[[int], dict[str, Found]], ranks: int, name: str
) -> None:
    plain = {key: value for key, value in RUNS[ranks][name].items() if not key.startswith("strategy")}
    assert deviation(trained(ranks)[name], alone(plain)) < TOLERANCE


def test_a_pipeline_takes_no_weights_of_samples() -> None:
    samples = Part(torch.zeros(8, 4), torch.zeros(8, 1), stored_weights=torch.ones(8))
    workload = Workload(samples, 8, LOSSES["mse"], FP32)
    with pytest.raises(BadOption, match="weights of samples cannot go through a pipeline"):
        divide(Layout("pipeline", 2, 1), nn.Linear(4, 1), workload)


def test_teams_have_samples_of_their_own(trained: Callable[[int], dict[str, Found]]) -> None:
    record = trained(4)["tensor"].history[0]
    first, second = (rank.samples for rank in record.ranks[::2])
    assert [rank.samples for rank in record.ranks] == [first, first, second, second]
    assert first + second == record.train.samples


def test_amounts_of_a_table_are_learned_in_deviations_in_every_way(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(80, 3)) * [1.0, 1e3, 1e-3]
    amounts = 5 + rows @ np.diag([0.1, 1e-6, 1.0])
    lines = [",".join(map(repr, line)) for line in np.hstack([rows, amounts]).tolist()]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,c,x,y,z", *lines]) + "\n")
    data = {"data": f"{tmp_path}/a.csv", "data_options": {"target": ["x", "y", "z"]}, "steps": 30}
    plain = DEEP | data | {"loss": "mse", "lr": 0.01}
    ways = {way: plain | {"parallel": way} for way in WAYS} | {"accumulate": plain | {"accumulate": 2}}
    wanted, found = alone(plain), on_ranks(3, ways)
    assert all(deviation(found[way], wanted) < TOLERANCE for way in ways)
    metrics = wanted.history[-1].train.metrics
    assert metrics
    assert all(found[way].history[-1].train.metrics == pytest.approx(metrics, rel=1e-9) for way in ways)
    losses = [record.train.loss for record in wanted.history]
    assert max(losses) < amounts.var(0).mean() * 1.1  # of the amounts' own size, 5 being known
