"""A network with all that a state dictionary can have, and checkpoints of its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.state import State
from tutti.strategies import Clip, Strategy, Sync
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.evaluation import Objective
from tutti.training.intervals import Every
from tutti.training.losses import LOSSES
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.trainer import Trainer

WIDTH = 7

CASES = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TARGETS = torch.randint(WIDTH, (24,), generator=torch.Generator().manual_seed(3))


class Network(nn.Module):
    """Tied weights, statistics of BatchNorm, a frozen layer and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen, self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.register_buffer("passing", torch.ones(WIDTH), persistent=False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        # Without tanh BatchNorm would take the bias away: its gradient is rounding, which Adam enlarges.
        hidden: Tensor = self.norm(torch.tanh(self.first(inputs))) * self.passing
        return self.last(torch.tanh(self.frozen(hidden)))


def optimizer_of(module: Network) -> Optimizer:
    """Two param groups."""
    biases = [module.first.bias, module.last.bias]
    others = [p for p in module.parameters() if not any(p is bias for bias in biases)]
    return Adam([{"params": others}, {"params": biases, "lr": 0.03}], lr=0.01, betas=(0.8, 0.99))


def train(folder: Path, ranks: int, strategy: Callable[[], Strategy] = Sync) -> None:
    """Leave a checkpoint of step 4."""
    VirtualWorld(ranks).run(_train, folder, strategy)


def _train(comm: Communicator, folder: Path, strategy: Callable[[], Strategy]) -> None:
    module, chosen = Network(), strategy()
    part = Part(CASES, TARGETS)
    batches = Batches(part, 12, comm.rank, comm.size, 1, seed=5, own=chosen.pace is not Pace.TOGETHER)
    optimizer = optimizer_of(module)

    replica = place(module, comm, chosen.home)
    with Saver(comm, folder / "checkpoints", 3) as saver:

        def save(step: int, state: State, decision: Decision) -> None:
            if not decision.final:
                saver.save(step, state, wait=True)

        worker = chosen.worker(replica, comm, optimizer, Clip())
        agenda = Agenda(comm, Wishes(Every.parse("4 steps", "--checkpoint")))
        workers = Workers(comm, replica, worker, optimizer)
        schedule = Schedule(batches, steps=6)
        Trainer(
            workers, Objective(LOSSES["cross_entropy"]), schedule, hooks=Hooks(save=save), agenda=agenda
        ).fit()
