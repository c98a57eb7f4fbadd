"""Workers that each have a model, batches and a speed of their own; and the order in which they finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Clip, Strategy, Worker
from tutti.strategies.centred import Centred
from tutti.strategies.measurements import Traffic
from tutti.strategies.placement import place

LENGTH = 5

SPEEDS = (1.0, 1.31, 0.77)
"""Seconds that the workers need for a batch: no two of them ever finish at the same moment."""


class Point(nn.Module):
    """A model that is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))
        self.second = nn.Parameter(torch.linspace(1, 2, LENGTH - 3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return torch.cat([self.first, self.second])


def start() -> Tensor:
    return Point()().detach()


@cache
def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The curvature and the minimum of the loss of a worker's batch."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return 0.5 + torch.rand(LENGTH, generator=generator, dtype=torch.float64), torch.randn(
        LENGTH, generator=generator, dtype=torch.float64
    )


def gradient(weights: Tensor, rank: int, step: int) -> Tensor:
    """Of the loss curvature / 2 * (weights - minimum)^2."""
    curvature, minimum = batch(rank, step)
    return curvature * (weights - minimum)


def finishes(steps: int, speeds: Sequence[float] = SPEEDS) -> list[tuple[int, int]]:
    """(rank, step) in the order in which batches are finished by workers that never wait."""
    ends = [(speed * (step + 1), rank, step) for rank, speed in enumerate(speeds) for step in range(steps)]
    return [(rank, step) for _, rank, step in sorted(ends)]


def sgd(lr: float = 0.1, **options: float) -> Callable[[nn.Module], Optimizer]:
    return lambda module: optim.SGD(module.parameters(), lr=lr, **options)


@dataclass(frozen=True)
class Outcome:
    """What a worker has in the end, and after each of its steps."""

    final: Tensor
    steps: list[Tensor]
    traffic: Traffic
    seconds: float


@dataclass(frozen=True)
class Setting:
    """How workers train; each makes `steps` steps, but for those that it is late for, if it skips them."""

    strategy: Strategy
    optimizer: Callable[[nn.Module], Optimizer] = field(default_factory=sgd)
    steps: int = 12
    speeds: Sequence[float] = SPEEDS
    clip: Clip = field(default_factory=Clip)
    settle_at: int = -1
    skips: bool = True


def train(comm: Communicator, setting: Setting) -> Outcome | None:
    """One rank's run; a server has no outcome."""
    module = Point()
    optimizer = setting.optimizer(module)
    if comm.servers is not None and comm.servers.serving:
        assert isinstance(setting.strategy, Centred)
        setting.strategy.serve(comm.servers, Replica(module), optimizer, setting.clip)
        return None
    replica = place(module, comm, setting.strategy.home)
    worker = setting.strategy.worker(replica, comm, optimizer, setting.clip)
    steps = []
    for step in range(setting.steps):
        if worker.late and setting.skips:
            worker.skip()
        else:
            curvature, minimum = batch(comm.rank, step)
            (curvature / 2 * (module() - minimum) ** 2).sum().backward()
            comm.compute(setting.speeds[comm.rank])
            worker.step()
        assert not replica.flats[0].grads.any()
        steps.append(module().detach().clone())
        if step == setting.settle_at:
            evaluate(worker, module, comm)
    worker.finish()
    comm.barrier()
    return Outcome(module().detach().clone(), steps, worker.traffic, comm.clock())


def evaluate(worker: Worker, module: Point, comm: Communicator) -> Tensor:
    """Settle, look at the weights, which are the same everywhere, and go on."""
    own = module().detach().clone()
    worker.settle()
    evaluated = module().detach().clone()
    assert all(torch.equal(other, evaluated) for other in comm.all_gather_objects(evaluated))
    worker.resume()
    assert torch.equal(module(), own)
    return evaluated


def run(setting: Setting, world: VirtualWorld | None = None) -> list[Outcome]:
    """All workers' outcomes."""
    found = (world or VirtualWorld(len(setting.speeds))).run(train, setting)
    for outcome in found[1:]:
        assert torch.equal(outcome.final, found[0].final)
    return found


def wake_late(comm: Communicator) -> None:
    """Have a rank go on from every barrier a second later than the others, as if its core were taken."""
    barrier = comm.barrier

    def late() -> None:
        barrier()
        comm.compute(1.0)

    comm.barrier = late


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
