"""Each sample's gradient moves the weights once in an epoch, and by its share, whoever computes it.

Sample i is the i-th unit vector, and the loss is minus the mean of the outputs: its gradient, the same at any
weights, moves the i-th weight alone. So the weights are a ledger of what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn, optim

from tests.trainers import trainer_of
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, Part, Queue
from tutti.data.parts import DataSet
from tutti.replica import Replica
from tutti.strategies import (
    ADPSGD,
    Clip,
    DiLoCo,
    Downpour,
    Gossip,
    Hogwild,
    Lazy,
    Local,
    ParamServer,
    Strategy,
    Sync,
)
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place
from tutti.training.losses import LossFunction, named_loss

SAMPLES, EPOCHS, SEED = 23, 2, 5
WEIGHTS = torch.arange(SAMPLES, dtype=torch.float64) % 3  # of the samples, in a loss with its own denominator


class PeakMemory(nn.Module):
    """One weight for each sample, in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(9, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(SAMPLES - 9, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.cat([self.first, self.second])


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.mean()


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return -(outputs * targets).sum(), targets.sum()


@dataclass(frozen=True)
class Case:
    """A run; `averages` says whether the workers' weights are averaged, so that each counts for a part."""

    strategy: Strategy
    workers: int = 4
    per_host: int | None = None
    servers: int = 0
    levels: int = 1
    queue: bool = False
    averages: bool = False
    batch_size: int = 5

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.strategy.options().items()]
        world = f"{self.workers}on{self.per_host}s{self.servers}l{self.levels}{'q' if self.queue else ''}"
        return "-".join([self.strategy.name, world, *options])


CASES = [
    Case(Sync()),
    Case(Sync(every=3), per_host=3),
    Case(Sync(collective="ring"), workers=5),
    Case(ParamServer()),
    Case(ParamServer(), workers=5, per_host=2, servers=2),
    *(
        Case(Downpour(push_every=push, pull_every=pull, side=side), workers=3)
        for push, pull in ((1, 1), (3, 2), (1, 3), (2, 1))
        for side in ("centre", "worker")
    ),
    Case(Downpour(push_every=2), per_host=2, servers=1),
    Case(Downpour(), per_host=2, servers=2, levels=2),
    Case(Downpour(push_every=2, pull_every=3), workers=3, queue=True),
    Case(Lazy(slack=1), workers=3),
    Case(Lazy(slack=0), workers=5, per_host=2, servers=1),
    Case(Lazy(slack=2), queue=True),
    Case(Hogwild()),
    Case(Hogwild(), workers=3, queue=True),
    Case(Local(every=2, after=1), averages=True),
    Case(Local(every=100), workers=9, per_host=4, averages=True),
    Case(DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0), averages=True),
    Case(Gossip("exponential", every=2), workers=5, per_host=2, averages=True),
    Case(Gossip("shift_one"), averages=True),
    Case(ADPSGD(), workers=5, averages=True),
    Case(ADPSGD("ring"), per_host=2, queue=True, averages=True),
]


def train(comm: Communicator, case: Case, loss: LossFunction) -> Tensor | None:
    """The weights that one worker is left with."""
    module = PeakMemory()
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    if comm.servers is not None and comm.servers.serving:
        assert isinstance(case.strategy, Centred)
        case.strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return None
    part = Part(torch.eye(SAMPLES, dtype=torch.float64), WEIGHTS)
    replica = place(module, comm, case.strategy.home)
    own = case.strategy.pace is not Pace.TOGETHER
    passes = case.strategy.passes
    batches = Batches(part, case.batch_size, comm.rank, comm.size, passes, seed=SEED, own=own)
    trainer_of(
        comm=comm,
        replica=replica,
        worker=case.strategy.worker(replica, comm, optimizer, Clip()),
        optimizer=optimizer,
        batches=Queue(batches, comm.counter().add) if case.queue else batches,
        loss=named_loss(loss, DataSet("ledger", part, None, None, None, ())),
        epochs=EPOCHS,
        validation=part,
        seconds_per_sample=(1.0, 1.31e-3, 0.77, 0.113)[comm.rank % 4],
    ).fit()
    comm.barrier()
    return torch.cat([module.first.detach(), module.second.detach()]).clone()


def batches_of(case: Case) -> Iterator[Tensor]:
    """The samples behind each update, or each worker's batch."""
    together = case.strategy.pace is Pace.TOGETHER
    order = Batches(Part(torch.zeros(SAMPLES, 1), WEIGHTS), SAMPLES, seed=SEED).order
    for epoch in range(EPOCHS):
        if together or case.queue:
            yield from order(epoch).split(case.batch_size)
            continue
        for of_all in order(epoch).split(case.batch_size * case.workers):
            yield from of_all.tensor_split(case.workers)


@pytest.mark.parametrize("loss", [mean, weighted])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_gradient_arrives_once_with_its_share(case: Case, loss: LossFunction) -> None:
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    counted = torch.ones_like(WEIGHTS) if loss is mean else WEIGHTS
    for samples in batches_of(case):
        whole = float(counted[samples].sum())
        if whole:
            expected[samples] += counted[samples] / whole
    if case.averages:
        expected /= case.workers
    world = VirtualWorld(
        case.workers, case.per_host, servers=case.servers, levels=case.levels, server_period=3
    )
    for found in world.run(train, case, loss):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
