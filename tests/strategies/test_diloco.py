"""DiLoCo follows the loop of its paper, batch by batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import Point, Setting, assert_close, batch, evaluate, gradient, run, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Clip, DiLoCo, Local
from tutti.strategies.placement import place


def adamw(module: nn.Module) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def by_hand(strategy: DiLoCo, steps: int, workers: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Algorithm 1, with torch's own optimizers: the final weights, and each worker's in the last round."""
    outer = nn.Parameter(start())
    outwards = optim.SGD(
        [outer], lr=strategy.outer_lr, momentum=strategy.outer_momentum, nesterov=strategy.outer_momentum > 0
    )
    inner = [nn.Parameter(start()) for _ in range(workers)]
    optimizers = [optim.AdamW([weights], lr=0.05, weight_decay=0.1) for weights in inner]
    for begin in range(0, steps, strategy.every):
        for weights in inner:
            weights.data.copy_(outer.data)
        for step in range(begin, min(steps, begin + strategy.every)):
            for rank, (weights, optimizer) in enumerate(zip(inner, optimizers, strict=True)):
                weights.grad = gradient(weights.detach(), rank, step)
                optimizer.step()
        outer.grad = sum(outer.detach() - weights.detach() for weights in inner) / workers
        outwards.step()
    return outer.detach(), [weights.detach() for weights in inner]


OPTIONS = [
    DiLoCo(every=3),
    DiLoCo(every=4),
    DiLoCo(every=3, outer_lr=1.0),
    DiLoCo(every=3, outer_momentum=0.0),
    DiLoCo(every=5, outer_lr=0.5, outer_momentum=0.5),
]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: DiLoCo, hosts: tuple[int, ...]) -> None:
    # With 12 steps, the last round of one of these is shorter than the others.
    setting = Setting(strategy, adamw, steps=12)
    expected, inner = by_hand(strategy, setting.steps)
    found = run(setting, VirtualWorld(3, hosts))
    assert_close(found[0].final, expected)
    if setting.steps % strategy.every:
        for outcome, wanted in zip(found, inner, strict=True):
            assert_close(outcome.steps[-1], wanted)


def test_a_plain_outer_step_is_local_sgd() -> None:
    strategy = DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0)
    assert_close(run(Setting(strategy))[0].final, run(Setting(Local(every=4)))[0].final)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_what_is_evaluated_is_what_a_run_that_ends_there_gives(step: int) -> None:
    def program(comm: Communicator) -> bool:
        module = Point()
        replica = place(module, comm, DiLoCo.home)
        worker = DiLoCo(every=4).worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        for number in range(step + 1):
            curvature, minimum = batch(comm.rank, number)
            (curvature / 2 * (module() - minimum) ** 2).sum().backward()
            worker.step()
        evaluated = evaluate(worker, module, comm)
        worker.finish()
        return torch.equal(evaluated, module())

    assert VirtualWorld(2).run(program) == [True, True]


def test_exchanges_are_counted() -> None:
    traffic = run(Setting(DiLoCo(every=5), adamw, steps=10))[0].traffic
    assert traffic.exchanges == 2
    assert traffic.bytes_sent == 2 * 8 * 32  # two parameters, each at an aligned place
