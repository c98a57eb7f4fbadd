"""Pipelines: every schedule learns what the undivided model learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.model_parallel.runs import (
    CNN,
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
from tutti.records.pipeline import SCHEDULES

PIPELINE: Run = {"parallel": "pipeline"}
DEEP: Run = MLP | PIPELINE | {"model_options": {"hidden": [24, 18, 16, 14, 12]}}


RESIDUAL: Run = MLP | PIPELINE | {"model": "tests.model_parallel.models:ResidualNet", "model_options": {}}
ENCODER: Run = RESIDUAL | {"model": "tests.model_parallel.models:Encoder"}


def scheduled(schedule: str, microbatches: int | None = None) -> Run:
    return {
        "parallel_options": {"schedule": schedule} | ({"microbatches": microbatches} if microbatches else {})
    }


EVERYWHERE: dict[str, Run] = {f"{name} in 6": DEEP | scheduled(name, 6) for name in SCHEDULES}
"""Runs that must come out as on one rank. 16 samples in 6 microbatches leave something over."""

BY_THREE: dict[str, Run] = {
    "lenet": LENET | PIPELINE,
    "cnn": CNN | PIPELINE,
    "adam": DEEP | {"optimizer": "adam", "optimizer_options": {}, "lr": 0.01},
    "weighed": LENET | PIPELINE | WEIGHED | {"parallel_options": {"microbatches": 6}},
    "clipped": LENET | PIPELINE | {"clip_norm": 0.1, "clip_value": 0.05},
}
"""What no schedule knows of: three ranks have a first stage, one in the middle, and a last one."""


TRACED = {"residual": RESIDUAL, "encoder": ENCODER}
"""Models whose own forward is traced, which takes longest: each schedule meets both, on 2 ranks or on 3.

And the number of microbatches that a schedule has by itself.
"""


def runs(ranks: int) -> dict[str, Run]:
    """By name."""
    models = [*TRACED] * len(SCHEDULES)
    pairs = zip(models[ranks % 2 :], SCHEDULES, strict=False)
    traced = {f"{name}, {schedule}": TRACED[name] | scheduled(schedule) for name, schedule in pairs}
    return EVERYWHERE | (BY_THREE if ranks == 3 else {}) | traced


@pytest.fixture(scope="module")
def trained() -> Callable[[int], dict[str, Found]]:
    return cache(lambda ranks: on_ranks(ranks, runs(ranks)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 3) for name in runs(ranks)])
def test_a_run_follows_the_undivided_model(
    trained: Callable[[int], dict[str, Found]], ranks: int, name: str
) -> None:
    assert deviation(trained(ranks)[name], alone(runs(ranks)[name])) < TOLERANCE


@pytest.mark.timeout(300)
def test_teams_with_samples_of_their_own_follow_it_too() -> None:
    runs = {name: DEEP | scheduled(name) | {"parallel": "data=2,pipeline=2"} for name in ("1f1b", "zbv")}
    for name, found in on_ranks(4, runs).items():
        assert deviation(found, alone(runs[name])) < TOLERANCE
