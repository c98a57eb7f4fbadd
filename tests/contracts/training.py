"""Tiny training runs, by any strategy on any communicator."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tests.trainers import trainer_of
from tutti.comm.base import Communicator, Group
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import Batches, Part, open_data
from tutti.model_parallel.base import Whole
from tutti.parameter_server.base import Centre
from tutti.records.run import EpochRecord
from tutti.records.trace import Trace
from tutti.replica import Replica
from tutti.strategies import Clip, Strategy, Worker
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS

SPEEDS = (1.0e-3, 1.31e-3, 0.77e-3, 1.13e-3)
"""Seconds that each rank needs for a sample on the virtual clock: no two finish at the same moment."""

_UNCLIPPED = Clip()

Data = Callable[[], tuple[Part, Part]]
"""The training and the test part. A function that can be imported: processes load the data themselves."""


@cache
def digits() -> tuple[Part, Part]:
    """The embedded digits."""
    comm = HostCommunicator.alone()
    data = open_data("digits", comm, validation=0.0)
    comm.close()
    assert data.test is not None
    return data.train, data.test


@cache
def clouds(samples: int = 100) -> tuple[Part, Part]:
    """Points in three clouds, a class each."""

    def part(count: int, seed: int) -> Part:
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(0, 3, (count,), generator=generator)
        centres = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        return Part(centres[targets] + torch.randn(count, 6, generator=generator), targets)

    return part(samples, 2), part(60, 3)


def perceptron() -> nn.Module:
    """For the digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def tiny() -> nn.Module:
    """For the clouds."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def exact() -> nn.Module:
    """In float64."""
    model = tiny().double()
    model.register_forward_pre_hook(lambda _, inputs: tuple(one.double() for one in inputs))
    return model


def normed() -> nn.Module:
    """With statistics that each rank gathers on its own."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def frozen() -> nn.Module:
    """Whose first layer is fixed."""
    model = tiny()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    """One matrix, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def sgd(parameters: Sequence[nn.Parameter], lr: float = 0.1, **options: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, **options)


def adamw(parameters: Sequence[nn.Parameter], lr: float = 0.01) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def halving(optimizer: Optimizer, every: int) -> LRScheduler:
    """Halves the learning rate every so many updates."""
    return torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)


def fading(optimizer: Optimizer, updates: int) -> LRScheduler:
    """Leads the learning rate down to a tenth."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)


@dataclass(frozen=True)
class Run:
    """What is trained, and how. Everything in it can be sent to another process."""

    strategy: Strategy
    model: Callable[[], nn.Module] = tiny
    data: Data = clouds
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] = sgd
    epochs: int = 2
    batch_size: int = 8
    passes: int = 1
    clip: Clip = field(default_factory=Clip)
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    speeds: Sequence[float] = SPEEDS
    on_epoch: Callable[[EpochRecord], None] | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Outcome:
    """What one worker has in the end."""

    weights: Tensor  # trained numbers, in the order of the model's parameters, without their duplicates
    fixed: Tensor  # frozen parameters and buffers
    accuracy: float  # on the test part
    history: list[EpochRecord]
    seconds: float  # on the communicator's clock


def needs_centre(strategy: Strategy) -> bool:
    return Centre in strategy.needs


def laid_out(
    module: nn.Module, comm: Communicator, strategy: Strategy, optimizer: Optimizer, clip: Clip = _UNCLIPPED
) -> tuple[Replica, Worker, Group | None]:
    """The model on this rank, its worker, and the ranks that this is made of, if there are several."""
    portion = Whole(module, comm, strategy)
    replica = portion.place(strategy)
    return replica, portion.worker(strategy, replica, optimizer, clip), portion.group


def train(comm: Communicator, run: Run) -> Outcome | None:
    """One rank's part in a run (collective); a server has no outcome."""
    torch.manual_seed(comm.rank)  # everybody begins with the weights of rank 0
    module = run.model()
    optimizer = run.optimizer([p for p in module.parameters() if p.requires_grad])
    if comm.servers is not None and comm.servers.serving:
        assert isinstance(run.strategy, Centred)
        run.strategy.serve(comm.servers, Replica(module), optimizer, run.clip)
        return None
    (training, test), own = run.data(), run.strategy.pace is not Pace.TOGETHER
    replica, worker, group = laid_out(module, comm, run.strategy, optimizer, run.clip)
    dealt = (comm.rank, comm.size) if group is None else (group.lane.rank, group.lane.size)
    team = (0, 1) if group is None else (group.ranks.rank, group.ranks.size)
    passes = run.passes * run.strategy.passes
    loss, metrics = LOSSES["cross_entropy"], (METRICS["accuracy"],)
    schedule = run.schedule(optimizer) if run.schedule else None
    trainer = trainer_of(
        comm=comm,
        replica=replica,
        worker=worker,
        group=None if group is None else group.ranks,
        optimizer=optimizer,
        batches=Batches(training, run.batch_size, *dealt, passes, seed=7, own=own, team=team),
        loss=loss,
        metrics=metrics,
        epochs=run.epochs,
        scheduler=schedule,
        seconds_per_sample=run.speeds[comm.rank % len(run.speeds)],
        on_epoch=run.on_epoch,
        trace=run.trace,
    )
    history = trainer.fit()
    found = evaluate(module, test, comm, Objective(loss, metrics)).total(comm)
    comm.barrier()
    fixed = [p for p in module.parameters() if not p.requires_grad]
    return Outcome(
        weights=_vector([p for p in module.parameters() if p.requires_grad]),
        fixed=_vector([*fixed, *module.buffers()]),
        accuracy=found.metrics["accuracy"],
        history=history,
        seconds=comm.clock(),
    )


def train_until_killed(comm: Communicator, run: Run, victim: int, forwards: int) -> None:
    """Train; rank `victim` is killed in its so-many-th forward pass, without a chance to say anything."""
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        if done == forwards:
            os.kill(os.getpid(), signal.SIGKILL)

    def fatal() -> nn.Module:
        model = run.model()
        model.register_forward_pre_hook(count)
        return model

    train(comm, replace(run, model=fatal) if comm.rank == victim else run)


def train_alone(run: Run) -> Tensor:
    """The weights after the same run by plain torch, in one process, with batches of `run.batch_size`."""
    torch.manual_seed(0)
    module, (training, _) = run.model(), run.data()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = run.optimizer(parameters)
    schedule = run.schedule(optimizer) if run.schedule else None
    batches = Batches(training, run.batch_size, seed=7)
    for epoch in range(run.epochs):
        for chosen in batches.order(epoch).split(run.batch_size):
            inputs, targets = training.take(chosen)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            if run.clip.value is not None:
                nn.utils.clip_grad_value_(parameters, run.clip.value)
            if run.clip.norm is not None:
                nn.utils.clip_grad_norm_(parameters, run.clip.norm)
            optimizer.step()
            if schedule:
                schedule.step()
    return _vector(parameters)


def distance(found: Tensor, expected: Tensor) -> float:
    """The 2-norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(t.detach().double().reshape(-1) for t in tensors)]).clone()
