"""Sharded training, and plans of DTensor: what scattered parameters learn is what the whole model learns."""

from __future__ import annotations

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

SHARDED: Run = {"parallel": "sharded"}
PLANNED: Run = {"parallel": "tensor", "parallel_options": {"plan": "tests.model_parallel.models:plan"}}

EQUAL: dict[str, Run] = {
    "mlp": MLP | SHARDED,
    "lenet": LENET | SHARDED,
    "cnn": CNN | SHARDED,
    "adam": MLP | SHARDED | {"optimizer": "adam", "optimizer_options": {}, "lr": 0.01},
    "weighed": LENET | SHARDED | WEIGHED,
    "clipped": LENET | SHARDED | {"clip_norm": 0.1, "clip_value": 0.05},
    "fewer samples than ranks": MLP | SHARDED | {"batch_size": 66, "steps": 4},
    "grouped": MLP | SHARDED | {"model": "tests.model_parallel.models:grouped", "model_options": {}},
    "tied": MLP | SHARDED | {"model": "tests.model_parallel.models:tied", "model_options": {}},
    "weighed, fewer samples than ranks": MLP | SHARDED | WEIGHED | {"batch_size": 66, "steps": 4},
    "plan": MLP | PLANNED,
    "plan, weighed": MLP | PLANNED | WEIGHED,
    "plan, clipped": MLP | PLANNED | {"clip_norm": 0.1},
}
"""Runs that must come out as on one rank."""


@pytest.fixture(scope="module")
def trained() -> dict[str, Found]:
    """By three ranks, over which little is cut evenly; teams of two are in other tests."""
    return on_ranks(3, EQUAL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EQUAL)
def test_a_run_follows_the_undivided_model(trained: dict[str, Found], name: str) -> None:
    assert deviation(trained[name], alone(EQUAL[name])) < TOLERANCE


@pytest.mark.timeout(300)
def test_teams_with_samples_of_their_own_follow_it_too() -> None:
    found = on_ranks(
        4,
        {
            "lenet": LENET | {"parallel": "data=2,sharded"},
            "plan": MLP | PLANNED | {"parallel": "data=2,tensor=2"},
        },
    )
    assert deviation(found["lenet"], alone(LENET)) < TOLERANCE
    assert deviation(found["plan"], alone(MLP)) < TOLERANCE


@pytest.mark.timeout(300)
def test_an_optimizer_that_looks_at_whole_parameters_sees_them() -> None:
    other = MLP | {"optimizer": "tests.model_parallel.models:Normalised", "optimizer_options": {}}
    found = on_ranks(2, {"mlp": other | SHARDED})
    assert deviation(found["mlp"], alone(other)) < TOLERANCE


WAYS = ("alike", "larger", "longer", "behind", "within")
MODELS: dict[str, Run] = {
    **{way: {"model": "tests.model_parallel.models:forked", "model_options": {"way": way}} for way in WAYS},
    "unused": {"model": "tests.model_parallel.models:residual", "model_options": {}, "steps": 2},
}
"""Models whose ranks use different layers, and one with a layer that no rank uses."""


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """The sentences by which models are refused, or nothing."""
    found = on_ranks(2, {name: MLP | SHARDED | model for name, model in MODELS.items()})
    return {name: one.refused for name, one in found.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_use_different_layers_are_told_so_and_what_to_do(
    refused: dict[str, str], way: str
) -> None:
    said = refused[way]
    assert said.startswith("BadModel: the ranks went through different layers of the model: ")
    assert "leave --parallel out" in said
    if way == "alike":
        assert "rank 0 came to 'left' where rank 1 came to 'right.0'" in said
    if way == "within":
        assert "rank 0 came to 'scales.one' where rank 1 came to 'scales.other'" in said


@pytest.mark.timeout(300)
def test_layers_that_no_rank_uses_are_no_difference(refused: dict[str, str]) -> None:
    assert not refused["unused"]
