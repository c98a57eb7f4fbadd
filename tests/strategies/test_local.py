"""Local SGD follows the loop of its papers, batch by batch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.strategies.alone import Setting, assert_close, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Local
from tutti.strategies.local import steepest
from tutti.strategies.placement import place

LR = 0.1


def test_averaging_after_each_step_is_synchronous_training_on_the_mean_gradient() -> None:
    weights = nn.Parameter(start())
    plain = optim.SGD([weights], lr=LR, momentum=0.9)
    setting = Setting(Local(every=7, after=12), sgd(LR, momentum=0.9))
    for step in range(setting.steps):
        weights.grad = sum(gradient(weights.detach(), rank, step) for rank in range(3)) / 3
        plain.step()
    assert_close(run(setting)[0].final, weights.detach())


C = math.sqrt(0.2**2 / (0.1 * (1 - 0.64 / 0.9)))
"""The bound of a mean by the root of its squares, with betas of 0.8 and 0.9."""

PLAIN, MOMENTUM, ADAMW = {}, {"momentum": 0.8}, {"betas": (0.8, 0.9)}
OPTIONS = [
    *((options, Local(every=1)) for options in (PLAIN, MOMENTUM)),
    *((options, Local(every=5)) for options in (PLAIN, MOMENTUM, ADAMW)),
    *((options, Local(every=4, after=3)) for options in (PLAIN, MOMENTUM)),
    (PLAIN, Local(every=100)),
    (MOMENTUM, Local(every=2, first_moment_every=3)),
    (ADAMW, Local(every=2, first_moment_every=6, second_moment_every=12)),
    (ADAMW, Local(every=2, first_moment_every=4)),
    (ADAMW, Local(every=3, first_moment_every=3, second_moment_every=3)),
    (ADAMW, Local(every=2, after=3, second_moment_every=4)),
]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize(("options", "strategy"), OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(
    options: dict[str, Any], strategy: Local, hosts: tuple[int, ...]
) -> None:
    """Weights and moments have periods of their own."""
    kind = optim.AdamW if options is ADAMW else optim.SGD
    setting = Setting(strategy, lambda module: kind(module.parameters(), lr=0.05, **options))
    found = run(setting, VirtualWorld(3, hosts))
    x = [nn.Parameter(start()) for _ in range(3)]
    optimizers = [kind([weights], lr=0.05, **options) for weights in x]
    periods = {
        "exp_avg": strategy.first_moment_every,
        "momentum_buffer": strategy.first_moment_every,
        "exp_avg_sq": strategy.second_moment_every,
    }
    for done in range(1, setting.steps + 1):
        for rank, (weights, optimizer) in enumerate(zip(x, optimizers, strict=True)):
            weights.grad = gradient(weights.detach(), rank, done - 1)
            optimizer.step()
        states = [optimizer.state[weights] for weights, optimizer in zip(x, optimizers, strict=True)]
        tensors = [([weights.data for weights in x], strategy.every)]
        tensors += [([state[key] for state in states], periods[key]) for key in periods if key in states[0]]
        for of_workers, every in tensors:
            if every and (done <= strategy.after or (done - strategy.after) % every == 0):
                mean = torch.stack(of_workers).mean(0)
                for one in of_workers:
                    one.copy_(mean)
        for state in states:
            if options is ADAMW:
                state["exp_avg"].copy_(state["exp_avg"].clamp(-C * (v := state["exp_avg_sq"].sqrt()), C * v))
        for outcome, weights in zip(found, x, strict=True):
            assert_close(outcome.steps[done - 1], weights.detach())
    assert_close(found[0].final, torch.stack([weights.detach() for weights in x]).mean(0))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.9), (0.9, 0.81), (0.0, 0.0)], ids=str)
def test_own_gradients_come_as_close_to_the_bound_as_can_be_and_not_over_it(
    betas: tuple[float, float],
) -> None:
    """It is reached by gradients that grow by beta2 / beta1; there is none if they would shrink."""
    growth = 1.2 if not betas[0] else max(1.0, betas[1] / betas[0])
    u = v = 0.0
    for step in range(400):
        u = betas[0] * u + (1 - betas[0]) * growth**step
        v = betas[1] * v + (1 - betas[1]) * growth ** (2 * step)
    if betas[0] ** 2 < betas[1]:
        assert u / math.sqrt(v) == pytest.approx(steepest(*betas), rel=1e-6)
    assert u / math.sqrt(v) <= steepest(*betas) * (1 + 1e-12)


@pytest.mark.parametrize("second", [0, 3])
def test_a_mean_from_others_moves_no_weight_without_own_squares(second: int) -> None:
    """The second worker never sees a gradient; before its squares are averaged it stays where it is."""

    def program(comm: Communicator) -> list[float]:
        module = nn.Linear(1, 1, bias=False).double()
        strategy = Local(every=100, first_moment_every=1, second_moment_every=second)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optim.Adam(module.parameters(), lr=0.1), Clip())
        found = [module.weight.item()]
        for _ in range(5):
            (module.weight * (1.0 - comm.rank)).sum().backward()
            worker.step()
            found.append(module.weight.item())
        return [before - after for before, after in pairwise(found)]

    _, moves = VirtualWorld(2).run(program)
    assert moves[:3] == [0.0] * 3
    assert all(0.0 < move < 1.0 for move in moves[3:]) == bool(second)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"first_moment_every": 2}, "SGD"),
        ({"second_moment_every": 3}, "SGD"),
        ({"second_moment_every": 3}, "Adafactor"),
    ],
)
def test_moments_that_an_optimizer_does_not_keep_are_refused(options: dict[str, int], name: str) -> None:
    kind = getattr(optim, name)
    with pytest.raises(BadOption, match=f"'{next(iter(options))}' .*, but {name} .* '--optimizer adamw'"):
        run(Setting(Local(**options), lambda module: kind(module.parameters(), lr=0.1)))


def test_exchanges_are_counted() -> None:
    traffic = run(Setting(Local(every=4, after=2), steps=12))[0].traffic
    assert traffic.exchanges == 4  # after steps 1, 2, 6, 10
    assert traffic.bytes_sent == 4 * 8 * 32  # two parameters, each at an aligned place
    assert traffic.wait_s > 0
