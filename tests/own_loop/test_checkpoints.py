"""Loops that were stopped in the middle of an epoch, and go on, end as if they had never been stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import CLASSES, FEATURES, adam, fit, samples, sgd
from tests.own_loop.worlds import Worlds
from tutti import strategies
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop, SampleCounts
from tutti.strategies import Strategy, Sync

COUNT, SIZE, EPOCHS = 26, 4, 3
"""Seven batches an epoch, the last of two samples: fewer than the three ranks."""


class Stopped(Exception):
    """The loop was stopped."""


@dataclass(frozen=True)
class Program:
    """A loop with a checkpoint after one of its steps.

    Attributes:
        optimizer: of the model.
        strategy: of `distribute`.
        shuffle: the loader does.
        of_rank: there are dropout and BatchNorm, which make of a rank's samples something of its own.
        workers: of the loader.
        at: the step behind which a checkpoint is taken.
    """

    optimizer: Callable[[nn.Module], Optimizer] = adam
    strategy: Strategy = field(default_factory=Sync)
    shuffle: bool = True
    of_rank: bool = False
    workers: int = 0
    at: int = 10

    def run(self, comm: Communicator, folder: Path | None, stop: bool) -> list[Any]:
        """Run it from its newest checkpoint to its end, or until there is one; returns what it ends with."""
        distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
        try:
            return self._run(folder, stop)
        finally:
            distribute._loop = None

    def _run(self, folder: Path | None, stop: bool) -> list[Any]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5)
        middle = [nn.BatchNorm1d(6), nn.Dropout(0.3)] if self.of_rank else [nn.Tanh()]
        model = nn.Sequential(nn.Linear(FEATURES, 6), *middle, nn.Linear(6, CLASSES)).double()
        model, optimizer = distribute.distribute(model, self.optimizer(model), self.strategy, clip_norm=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9, 12], 0.5)
        run = None if folder is None else distribute.checkpoints(folder, scheduler=scheduler)
        step = run.restore() if run else 0
        first = run.values.get("epoch", 0) if run else 0
        loader = DataLoader(
            samples(COUNT + 2 * self.of_rank), SIZE, shuffle=self.shuffle, num_workers=self.workers
        )
        for epoch in range(first, EPOCHS):
            for inputs, targets in distribute.shard(loader):
                optimizer.zero_grad()
                fit(model, inputs, targets).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if run and stop and step == self.at:
                    assert run.save(step, epoch=epoch, wait=True)
                    return []
            torch.rand(1), random.random(), np.random.rand()  # as the loop itself may
        distribute.finish(model)
        return [
            {name: value.clone() for name, value in model.state_dict().items()},
            [group["lr"] for group in optimizer.param_groups],
            [torch.rand(1), random.random(), np.random.rand()],
        ]


def _ends(
    worlds: Worlds, program: Program, folder: Path, sizes: tuple[int, int]
) -> tuple[list[Any], list[Any]]:
    """What a loop ends with, never stopped and stopped; both ranks by ranks, of these numbers."""
    before, after = sizes
    wanted = worlds.call(partial(program.run, folder=None, stop=False), before)
    worlds.call(partial(program.run, folder=folder, stop=True), before)
    return wanted, worlds.call(partial(program.run, folder=folder, stop=False), after)


@pytest.mark.parametrize("at", [2, 7, 10, 14])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_same_ranks_end_with_the_same_bits(worlds: Worlds, tmp_path: Path, at: int, shuffle: bool) -> None:
    program = Program(shuffle=shuffle, of_rank=True, at=at)
    wanted, found = _ends(worlds, program, tmp_path, (2, 2))
    for one, other in zip(found, wanted, strict=True):
        assert repr(one[1:]) == repr(other[1:])
        assert all(torch.equal(one[0][name], other[0][name]) for name in other[0])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 2)])
@pytest.mark.parametrize("at", [3, 7])
def test_other_ranks_end_with_the_same_numbers(
    worlds: Worlds, tmp_path: Path, before: int, after: int, at: int
) -> None:
    wanted, found = _ends(worlds, Program(at=at), tmp_path, (before, after))
    for one in found:
        assert differences(one, wanted[0]) == []


OPTIMIZERS = {
    "sgd": sgd,
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": [p]} for p in model.parameters()], lr=0.01, betas=(0.8, 0.9), amsgrad=True
    ),
    "foreach": lambda model: torch.optim.NAdam(model.parameters(), foreach=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_go_on(worlds: Worlds, tmp_path: Path, optimizer: str) -> None:
    wanted, found = _ends(worlds, Program(OPTIMIZERS[optimizer]), tmp_path, (2, 3))
    for one in found:
        assert differences(one[:2], wanted[0][:2]) == []


STRATEGIES = {
    "compressed": Sync(compress="top_k", keep=0.1, compress_inside=True),
    "gathered": Sync(every=2),
    "local": strategies.Local(every=3),
    "diloco": strategies.DiLoCo(every=2),
    "gossip": strategies.Gossip(every=2),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_go_on(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    """The workers have their own weights and optimizers, and what is left of earlier gradients.

    An epoch's seven batches are dealt in turn under some: in the third step one rank has none.
    """
    wanted, found = _ends(worlds, Program(strategy=STRATEGIES[strategy], at=2), tmp_path, (2, 2))
    for one, other in zip(found, wanted, strict=True):
        assert repr(one[1:]) == repr(other[1:])
        assert all(torch.equal(one[0][name], other[0][name]) for name in other[0])
