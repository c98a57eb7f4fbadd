"""Plain torch, step by step, and the same run by a strategy's workers: for tests to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.comm.base import Communicator, cut
from tutti.strategies.base import Clip, Strategy
from tutti.strategies.placement import place

SAMPLES, BATCH = 300, 32  # the last of an epoch's ten batches has 12 samples


@dataclass(frozen=True)
class Case:
    """A training run, whoever runs it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int = 50
    clip: Clip = field(default_factory=Clip)
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    dtype: torch.dtype = torch.float32

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 12, generator=generator, dtype=self.dtype)
        targets = torch.randint(0, 5, (SAMPLES,), generator=generator)
        per_epoch = -(-SAMPLES // BATCH)
        for step in range(self.steps):
            chosen = slice(step % per_epoch * BATCH, (step % per_epoch + 1) * BATCH)
            yield inputs[chosen], targets[chosen]


def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(inputs).double(), targets)


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def sequential(case: Case) -> Tensor:
    """The weights after plain torch's run."""
    module = case.build()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = case.optimizer(module)
    schedule = case.schedule(optimizer) if case.schedule else None
    for inputs, targets in case.batches():
        loss(module, inputs, targets).backward()
        if case.clip.value is not None:
            nn.utils.clip_grad_value_(trained, case.clip.value)
        if case.clip.norm is not None:
            nn.utils.clip_grad_norm_(trained, case.clip.norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    return weights_of(module)


def by_strategy(comm: Communicator, case: Case, strategy: Strategy) -> Tensor:
    """This rank's weights after the strategy's run; ranks begin with different weights of their own."""
    module = case.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(comm.rank)
    replica = place(module, comm, strategy.home)
    optimizer = case.optimizer(module)
    worker = strategy.worker(replica, comm, optimizer, case.clip)
    schedule = case.schedule(optimizer) if case.schedule else None
    for inputs, targets in case.batches():
        worker.share = 0.0
        for turn in cut(len(inputs), strategy.passes):
            own = cut(turn.stop - turn.start, comm.size)[comm.rank]
            x, y = inputs[turn][own], targets[turn][own]
            worker.share += len(x) / len(inputs)
            if len(x):
                (loss(module, x, y) * (len(x) / len(inputs))).backward()
        worker.step()
        if schedule:
            schedule.step()
    worker.finish()
    comm.barrier()
    return weights_of(module).clone()


def distance(found: Tensor, expected: Tensor) -> float:
    """The 2-norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())
