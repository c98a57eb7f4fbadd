"""LARS, LAMB, linear scaling and the RMSprop warm-up, in numbers worked by hand; and under `sync`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.strategies.sequential import Case, by_strategy, distance, sequential
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.optim.named import build
from tutti.optim.optimizers.lamb import LAMB
from tutti.optim.optimizers.lars import LARS
from tutti.optim.schedulers.linear_scaling import LinearScalingLR
from tutti.optim.schedulers.warmup_cosine import WarmupCosineLR
from tutti.optim.schedules import schedule
from tutti.strategies import Sync


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: Optimizer, weights: nn.Parameter, *gradient: float) -> list[float]:
    weights.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()
    return weights.tolist()


def test_lars() -> None:
    # |w| = 5, |g| = 10: rate = 0.1 * 5 / (10 + 0.5 * 5) = 0.04; g + 0.5 w = (7.5, 10)
    # v = 2 * 0.04 * (7.5, 10) = (0.6, 0.8); w = (2.4, 3.2)
    weights = parameter(3.0, 4.0)
    optimizer = LARS([weights], lr=2.0, momentum=0.5, weight_decay=0.5, trust=0.1)
    assert step(optimizer, weights, 6.0, 8.0) == pytest.approx([2.4, 3.2])
    # |w| = 4, g = 0: rate 1, g + 0.5 w = (1.2, 1.6); v = 0.5 * (0.6, 0.8) + 2 * (1.2, 1.6) = (2.7, 3.6)
    assert step(optimizer, weights, 0.0, 0.0) == pytest.approx([-0.3, -0.4])


def test_lamb() -> None:
    # After the bias correction M = g, V = g^2: M / sqrt(V) = (1, -1). u = (1 + 0.1 * 3, -1 + 0.1 * 4)
    weights = parameter(3.0, 4.0)
    optimizer = LAMB([weights], lr=0.2, betas=(0.5, 0.75), eps=0.0, weight_decay=0.1)
    length = math.hypot(1.3, -0.6)
    first = [3 - 0.2 * 5 / length * 1.3, 4 + 0.2 * 5 / length * 0.6]
    assert step(optimizer, weights, 6.0, -8.0) == pytest.approx(first)
    # m = (0.5 * 3 + 0.5 * 2, 0.5 * -4 + 0) = (2.5, -2), M = m / 0.75
    # v = 0.75 * (9, 16) + 0.25 * (4, 0) = (7.75, 12), V = v / 0.4375
    u = [
        m / 0.75 / math.sqrt(v / 0.4375) + 0.1 * w
        for m, v, w in zip((2.5, -2), (7.75, 12), first, strict=True)
    ]
    ratio = math.hypot(*first) / math.hypot(*u)
    expected = [w - 0.2 * ratio * x for w, x in zip(first, u, strict=True)]
    assert step(optimizer, weights, 2.0, 0.0) == pytest.approx(expected)


def test_a_cosine_follows_a_warm_up() -> None:
    made = schedule("warmup_cosine", optim.SGD([parameter(1.0)], lr=1.0), 12, {"warmup": 3, "final": 0.1})
    assert isinstance(made, WarmupCosineLR)
    expected = [0.25, 0.5, 0.75, *(0.1 + 0.9 * (1 + math.cos(math.pi * t / 9)) / 2 for t in range(10))]
    # Behind the end of the run the rate stays as it is there.
    assert rates(made, 16) == pytest.approx([*expected, 0.1, 0.1, 0.1], rel=1e-12)
    assert rates(WarmupCosineLR(optim.SGD([parameter(1.0)], lr=1.0), 100), 6)[-1] == 1.0
    for options in ({"warmup": 12}, {"warmup": -1}, {"final": 2}):
        with pytest.raises(BadOption, match="expected warmup from 0 to below 12 updates"):
            schedule("warmup_cosine", optim.SGD([parameter(1.0)], lr=1.0), 12, options)


def rates(scheduler: LinearScalingLR, updates: int) -> list[float]:
    found = []
    for _ in range(updates):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_the_rate_rises_to_k_times_and_drops_later() -> None:
    scheduler = schedule(
        "linear_scaling",
        optim.SGD([parameter(1.0)], lr=0.1),
        10,
        {"factor": 5.0, "warmup": 4, "drops": [0.6, 0.8]},
    )
    assert isinstance(scheduler, LinearScalingLR)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005]
    assert rates(scheduler, 10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lars", {"lr": -0.5}, "lr is -0.5"),
        ("lars", {"trust": 0.0}, "trust 0.0; expected .* trust above 0"),
        ("lars", {"momentum": 1.0}, "momentum 1.0, .* momentum from 0 to below 1"),
        ("lars", {"momentum": -0.1}, "momentum -0.1"),
        ("lars", {"weight_decay": -0.1}, "weight_decay -0.1"),
        ("lamb", {"lr": -0.5}, "lr is -0.5"),
        ("lamb", {"eps": -0.5}, "eps -0.5"),
        ("lamb", {"weight_decay": -0.5}, "weight_decay -0.5"),
        ("lamb", {"betas": [0.9, 1.0]}, r"betas \(0.9, 1.0\)"),
        ("lamb", {"betas": [-0.1, 0.9]}, r"betas \(-0.1, 0.9\)"),
    ],
)
def test_values_out_of_range_are_refused(name: str, options: dict[str, object], message: str) -> None:
    rate = options.pop("lr", None)
    with pytest.raises(BadOption, match=message):
        build(name, [parameter(1.0)], rate, options)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5)).double()


MADE = {
    "lars": lambda module: LARS(module.parameters(), lr=0.5, trust=0.02),
    "lamb": lambda module: LAMB(module.parameters(), lr=0.01),
}


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_sync_moves_whole_parameters_as_plain_torch_does(name: str, hosts: tuple[int, ...]) -> None:
    case = Case(model, MADE[name], 20, dtype=torch.float64)
    for found in VirtualWorld(3, hosts).run(by_strategy, case, Sync()):
        assert distance(found, sequential(case)) < 1e-9
