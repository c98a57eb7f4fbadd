"""Local SGD follows the loop of its papers, batch by batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import LENGTH, Setting, assert_close, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Clip, Local
from tutti.strategies.placement import place

LR = 0.1


def by_hand(strategy: Local, steps: int, momentum: float = 0.0, workers: int = 3) -> list[list[Tensor]]:
    """Each worker's weights after each step, and at last their mean."""
    x = [start() for _ in range(workers)]
    v = [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(workers)]
    found = []
    for step in range(steps):
        for rank in range(workers):
            v[rank] = momentum * v[rank] + gradient(x[rank], rank, step)
            x[rank] = x[rank] - LR * v[rank]
        done = step + 1
        if done <= strategy.after or (done - strategy.after) % strategy.every == 0:
            x = [torch.stack(x).mean(0)] * workers
        found.append(list(x))
    return [*found, [torch.stack(x).mean(0)] * workers]


OPTIONS = [Local(every=1), Local(every=5), Local(every=4, after=3), Local(every=100)]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Local, momentum: float, hosts: tuple[int, ...]) -> None:
    setting = Setting(strategy, sgd(LR, momentum=momentum))
    expected = by_hand(strategy, setting.steps, momentum)
    for rank, outcome in enumerate(run(setting, VirtualWorld(3, hosts))):
        for found, wanted in zip(outcome.steps, expected[:-1], strict=True):
            assert_close(found, wanted[rank])
        assert_close(outcome.final, expected[-1][rank])


def test_averaging_after_each_step_is_synchronous_training_on_the_mean_gradient() -> None:
    weights = nn.Parameter(start())
    plain = optim.SGD([weights], lr=LR, momentum=0.9)
    setting = Setting(Local(every=7, after=12), sgd(LR, momentum=0.9))
    for step in range(setting.steps):
        weights.grad = sum(gradient(weights.detach(), rank, step) for rank in range(3)) / 3
        plain.step()
    assert_close(run(setting)[0].final, weights.detach())


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_one_worker_trains_as_plain_torch_does(name: str) -> None:
    setting = Setting(
        Local(every=3),
        lambda m: getattr(optim, name)(m.parameters(), lr=0.05),
        speeds=(1.0,),
        clip=Clip(norm=2.0),
    )
    parts = [nn.Parameter(part) for part in start().split([3, 2])]
    plain = getattr(optim, name)(parts, lr=0.05)
    for step in range(setting.steps):
        whole = gradient(torch.cat([part.detach() for part in parts]), 0, step)
        for part, own in zip(parts, whole.split([3, 2]), strict=True):
            part.grad = own.clone()
        nn.utils.clip_grad_norm_(parts, 2.0)
        plain.step()
    assert_close(run(setting)[0].final, torch.cat([part.detach() for part in parts]))


def test_exchanges_are_counted() -> None:
    traffic = run(Setting(Local(every=4, after=2), steps=12))[0].traffic
    assert traffic.exchanges == 4  # after steps 1, 2, 6, 10
    assert traffic.bytes_sent == 4 * 8 * 32  # two parameters, each at an aligned place
    assert traffic.wait_s > 0


def test_a_worker_without_samples_takes_part_in_the_average() -> None:
    def program(comm: Communicator) -> float:
        module = nn.Linear(1, 1, bias=False)
        replica = place(module, comm, Local.home)
        worker = Local(every=1).worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
        before = module.weight.item()
        if comm.rank:
            worker.skip()
        else:
            (3 * module.weight).sum().backward()
            worker.step()
        return before - module.weight.item()

    assert VirtualWorld(3).run(program) == [pytest.approx(1.0)] * 3
