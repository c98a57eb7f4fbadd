"""Tensor parallelism: layers cut over the ranks learn what the undivided model learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.model_parallel.models import grouped, recurrent
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
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadModel
from tutti.model_parallel.tensor import split

TENSOR: Run = {"parallel": "tensor"}
TEAMS: Run = {"parallel": "data=2,tensor=2"}
OWN: Run = MLP | TENSOR | {"model_options": {}}

EQUAL: dict[str, Run] = {
    "mlp": MLP | TENSOR,
    "lenet": LENET | TENSOR,
    "cnn": CNN | TENSOR,
    "one step": CNN | TENSOR | {"steps": 1, "lr": 1.0},
    "adam": MLP | TENSOR | {"optimizer": "adam", "optimizer_options": {}, "lr": 0.01},
    "weighed": LENET | TENSOR | WEIGHED,
    "clipped": LENET | TENSOR | {"clip_norm": 0.1, "clip_value": 0.05},
    "dropout": CNN | TENSOR | {"model_options": {"channels": [6, 8], "hidden": 16, "dropout": 0.3}},
    "norm": OWN | {"model": "tests.model_parallel.models:normalised"},
    "tied": OWN | {"model": "tests.model_parallel.models:tied"},
    "dropped": OWN | {"model": "tests.model_parallel.models:dropped"},
    "dropped, channels last": OWN
    | {"model": "tests.model_parallel.models:dropped", "layout": "channels_last"},
    "own forward": OWN | {"model": "tests.model_parallel.models:Around"},
}
"""Runs that must come out as on one rank."""


@pytest.fixture(scope="module")
def trained() -> dict[str, Found]:
    """By three ranks, over which little is cut evenly; teams of two are in other tests."""
    return on_ranks(3, EQUAL)


@pytest.mark.parametrize("name", EQUAL)
def test_a_run_follows_the_undivided_model(trained: dict[str, Found], name: str) -> None:
    assert deviation(trained[name], alone(EQUAL[name])) < TOLERANCE


def test_teams_with_samples_of_their_own_follow_it_too() -> None:
    found = on_ranks(4, {"lenet": LENET | TEAMS})["lenet"]
    assert deviation(found, alone(LENET)) < TOLERANCE
    first, second = (rank.samples for rank in found.history[0].ranks[::2])
    assert [rank.samples for rank in found.history[0].ranks] == [first, first, second, second]
    assert first + second == found.history[0].train.samples


@pytest.mark.timeout(300)
def test_the_norm_of_what_all_teams_add_up_is_that_of_the_undivided_model() -> None:
    clipped = {"clip_norm": 0.1, "clip_value": 0.05}
    runs = {
        "lenet": LENET | TEAMS | clipped,
        "pipeline": LENET | clipped | {"parallel": "data=2,pipeline=2"},
        # A normalisation is whole on every rank of a team, and must count once.
        "norm": MLP
        | TEAMS
        | clipped
        | {"model": "tests.model_parallel.models:layer_normalised", "model_options": {}},
        "as a whole": LENET
        | TEAMS
        | clipped
        | {"strategy": "sync", "strategy_options": {"collective": "ring"}},
        "paramserver": LENET | TEAMS | clipped | {"strategy": "paramserver"},
    }
    found = on_ranks(4, runs)
    assert "strategy 'paramserver' would limit" in found.pop("paramserver").refused
    for name, one in found.items():
        plain = {key: value for key, value in runs[name].items() if not key.startswith("strategy")}
        assert deviation(one, alone(plain)) < TOLERANCE, name


def test_every_rank_has_its_share_of_the_weights_alone() -> None:
    def program(comm: Communicator) -> list[int]:
        module = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28, 4))
        split(module, comm)
        return [len(parameter) for parameter in module.parameters()]

    assert VirtualWorld(3).run(program) == [[3, 3, 2, 2], [2, 2, 1, 1], [2, 2, 1, 1]]


def test_outputs_are_those_of_the_undivided_model() -> None:
    def program(comm: Communicator) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28, 4))
        if comm.size > 1:
            split(module, comm)
        with torch.no_grad():
            return module(torch.ones(2, 3, 4, 4))

    (expected,) = VirtualWorld(1).run(program)
    for found in VirtualWorld(3).run(program):
        torch.testing.assert_close(found, expected)


def widths(module: nn.Sequential) -> list[list[int]]:
    """How wide the inputs of the second layer are, on each of 3 ranks."""

    def program(comm: Communicator) -> list[int]:
        layers, seen = copy.deepcopy(module), list[int]()
        split(layers, comm)
        forward = layers[1].forward
        layers[1].forward = lambda inputs: seen.append(inputs.shape[1]) or forward(inputs)
        layers(torch.ones(2, 3))
        return seen

    return VirtualWorld(3).run(program)


def test_between_layers_a_rank_has_its_own_channels_alone() -> None:
    assert widths(nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 4))) == [[3], [2], [2]]


@pytest.mark.parametrize("second", [nn.LayerNorm(7), nn.Softmax(1)])
def test_what_mixes_channels_gets_all_of_them(second: nn.Module) -> None:
    assert widths(nn.Sequential(nn.Linear(3, 7), second, nn.Linear(7, 4))) == [[7], [7], [7]]


def test_whoever_looks_on_with_a_hook_sees_all_channels() -> None:
    module = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 4))
    module[1].register_forward_hook(lambda *_: None)
    assert widths(module) == [[7], [7], [7]]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            recurrent(),
            r"layer '3' of the model is a LSTM, which cannot be cut by its outputs; use --parallel sharded",
        ),
        (grouped(), r"layer '1' of the model is a Conv2d of 2 groups"),
        (
            nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)),
            r"layer '1' .* 2 outputs, .* over 3 ranks; use tensor=2",
        ),
        (nn.Conv2d(3, 2, 3), r"layer 'Conv2d' of the model \(Conv2d\) has 2 channels"),
    ],
)
def test_a_layer_that_cannot_be_cut_is_named_with_a_remedy(module: nn.Module, message: str) -> None:
    def program(comm: Communicator) -> None:
        split(module, comm)

    with pytest.raises(BadModel, match=message):
        VirtualWorld(3).run(program)
