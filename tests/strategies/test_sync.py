"""`sync` on any number of ranks and hosts follows plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from tests.strategies.sequential import Case, by_strategy, distance, sequential, weights_of
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.optim.clipping import STEADY
from tutti.replica import NormShare
from tutti.strategies import Clip, Sync, WeightPlacement
from tutti.strategies.placement import place

SYNC = Sync()

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def world(ranks: int | tuple[int, ...]) -> VirtualWorld:
    return VirtualWorld(ranks) if isinstance(ranks, int) else VirtualWorld(sum(ranks), ranks)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 37), nn.Tanh(), nn.Linear(37, 18), nn.ReLU(), nn.Linear(18, 5)).to(
        dtype
    )


def optimizer(name: str, **options: object) -> Callable[[nn.Module], Optimizer]:
    return lambda module: getattr(optim, name)(module.parameters(), **options)


def run(case: Case, ranks: int | tuple[int, ...], strategy: Sync = SYNC) -> list[Tensor]:
    return world(ranks).run(by_strategy, case, strategy)


def assert_follows(
    case: Case, ranks: int | tuple[int, ...], strategy: Sync = SYNC, tolerance: float = 0
) -> None:
    expected = sequential(case)
    found = run(case, ranks, strategy)
    assert distance(found[0], expected) < (tolerance or TOLERANCE[case.dtype])
    for other in found[1:]:
        assert torch.equal(other, found[0])


MOMENTUM = optimizer("SGD", lr=0.1, momentum=0.9)

USUAL = {
    "sgd": optimizer("SGD", lr=0.2),
    "momentum": MOMENTUM,
    "nesterov": optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": optimizer("Adam", lr=0.01),
    "adam-amsgrad": optimizer("Adam", lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": optimizer("AdamW", lr=0.01, weight_decay=0.1),
}


OTHERS = ["Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, (2, 3), (1, 3), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", [*USUAL, *OTHERS])
def test_every_optimizer_agrees_with_plain_torch(name: str, ranks: int | tuple[int, ...]) -> None:
    made, steps = (USUAL[name], 50) if name in USUAL else (optimizer(name, lr=0.01), 3)
    assert_follows(Case(partial(mlp, torch.float64), made, steps, dtype=torch.float64), ranks)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_50_steps_agree_with_plain_torch_in_float32(name: str) -> None:
    assert_follows(Case(mlp, USUAL[name]), 3)


class Together(optim.Optimizer):
    """Divides the rate by the norm of all gradients and weights, over all param groups."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        moved = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        norm = sum(p.square().sum() + p.grad.square().sum() for p, _ in moved).sqrt()
        for parameter, rate in moved:
            parameter.sub_(parameter.grad * (rate / norm))


def together(module: nn.Module) -> Optimizer:
    first, *others = module.parameters()
    return Together([{"params": [first], "lr": 1.0}, {"params": others}], {"lr": 0.3})


@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.05)], ids=str)
@pytest.mark.parametrize("strategy", [SYNC, Sync(collective="ring")], ids=["native", "ring"])
@pytest.mark.parametrize("ranks", [1, 3, (2, 3)], ids=str)
def test_an_optimizer_may_use_all_parameters_together(
    ranks: int | tuple[int, ...], strategy: Sync, clip: Clip
) -> None:
    case = Case(partial(mlp, torch.float64), together, steps=10, clip=clip, dtype=torch.float64)
    assert_follows(case, ranks, strategy)


@pytest.mark.parametrize("ranks", [1, 3, (2, 3)], ids=str)
@pytest.mark.parametrize(
    "clip", [Clip(norm=0.05), Clip(value=0.01), Clip(norm=0.05, value=0.01), Clip(norm=1e6)], ids=str
)
def test_clipping_equals_torchs(clip: Clip, ranks: int) -> None:
    assert_follows(Case(mlp, MOMENTUM, clip=clip, steps=20), ranks)


SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=51),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=50),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduler_attached_to_the_optimizer_takes_effect(schedule: str, name: str) -> None:
    case = Case(mlp, USUAL[name], schedule=SCHEDULES[schedule])
    assert_follows(case, 3)
    assert distance(sequential(case), sequential(replace(case, schedule=None))) > 1e-3


def test_a_zero_eps_makes_no_nan_in_the_gaps_between_parameters() -> None:
    def check(comm: object) -> None:
        module = mlp()
        replica = place(module, comm, WeightPlacement.SHARED)
        made = optim.Adam(module.parameters(), lr=0.01, eps=0.0)
        worker = Sync().worker(replica, comm, made, Clip())
        for parameter in module.parameters():
            parameter.grad.fill_(1.0)
        worker.step()
        assert replica.flats[0].weights.isfinite().all()

    VirtualWorld(2).run(check)


def two_groups(module: nn.Module) -> Optimizer:
    weights = [p for p in module.parameters() if p.dim() > 1]
    biases = [p for p in module.parameters() if p.dim() == 1]
    return optim.AdamW([{"params": weights, "weight_decay": 0.5}, {"params": biases, "lr": 0.1}], lr=0.01)


def one_unused_group(module: nn.Module) -> Optimizer:
    return optim.SGD([p for p in module.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("groups", [two_groups, one_unused_group])
@pytest.mark.parametrize("ranks", [1, 2, 5, (2, 3)], ids=str)
def test_param_groups_keep_their_own_options(groups: Callable[[nn.Module], Optimizer], ranks: int) -> None:
    assert_follows(Case(mlp, groups), ranks)


@pytest.mark.parametrize("ranks", [1, 3], ids=str)
@pytest.mark.parametrize("every", [2, 40])
def test_accumulating_over_passes_changes_nothing(every: int, ranks: int) -> None:
    assert_follows(Case(mlp, MOMENTUM, steps=12), ranks, Sync(every=every))


def test_an_empty_part_takes_part_with_a_zero_gradient() -> None:
    assert_follows(Case(mlp, MOMENTUM, steps=11), 31)


def continued(module: nn.Module) -> Optimizer:
    """An optimizer with the state of one that has stepped a copy of the model before."""
    other = copy.deepcopy(module)
    before = optim.Adam(other.parameters(), lr=0.01)
    for number, parameter in enumerate(other.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    before.step()
    made = optim.Adam(module.parameters(), lr=0.01)
    made.load_state_dict(before.state_dict())
    return made


@pytest.mark.parametrize("ranks", [1, 3, (2, 3)], ids=str)
def test_state_that_the_optimizer_has_already_is_carried_over(ranks: int) -> None:
    case = Case(mlp, continued, steps=5)
    assert_follows(case, ranks)
    assert distance(sequential(case), sequential(replace(case, optimizer=USUAL["adam"]))) > 1e-4


@pytest.mark.parametrize("ranks", [1, 3, (2, 3)], ids=str)
def test_the_norm_of_a_divided_model_covers_all_ranks(
    ranks: int | tuple[int, ...],
) -> None:
    def program(comm: Communicator) -> Tensor:
        module = mlp(torch.float64)
        replica = place(module, comm, WeightPlacement.SHARED)
        others_count = module[2].weight
        replica.gradients.share = NormShare(
            lambda parameter: parameter is not others_count, lambda squares: squares + 7.0
        )
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        worker = SYNC.worker(replica, comm, optimizer, Clip(norm=0.5))
        for parameter in module.parameters():
            parameter.grad.fill_(1 / comm.size)
        before = weights_of(module)
        worker.step()
        return before - weights_of(module)

    lengths = [parameter.numel() for parameter in mlp().parameters()]
    norm = (sum(lengths) - lengths[2] + 7.0) ** 0.5
    for moved in world(ranks).run(program):
        expected = torch.full_like(moved, 0.5 / (norm + STEADY))
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-14)
