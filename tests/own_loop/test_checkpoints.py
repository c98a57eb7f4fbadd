"""Loops that were stopped in the middle of an epoch, and go on, end as if they had never been stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.kept_writers import keeping_writers
from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import (
    CLASSES,
    FEATURES,
    adam,
    batches,
    children_allowed,
    fit,
    net,
    samples,
    sgd,
)
from tests.own_loop.worlds import Worlds
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadCheckpoint, BadOption, BadRunFolder
from tutti.optim.optimizers.muon import Muon
from tutti.own_loop import distribute
from tutti.own_loop.checkpoints import Checkpoints
from tutti.own_loop.stepper import OwnLoop
from tutti.records.folder_lock import FolderLock
from tutti.state import State

COUNT, SIZE, EPOCHS = 26, 4, 3
"""Seven batches an epoch, the last of two samples: fewer than the three ranks."""


def by(workers: int) -> dict[str, Any]:
    """The options of a loader whose processes, if any, are forked from the rank and end with it.

    A rank of a test would start a fork server for them, which imports torch anew.
    """
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def leave() -> None:
    """Do what the end of a program does."""
    loop = distribute._loop
    for close in [] if loop is None else list(loop.folders.values()):
        close()
    distribute._loop = None


class CountingNorm(nn.BatchNorm1d):
    """A layer that remembers how often it was called, in an extra state."""

    calls = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) / (1 + self.calls)


@dataclass(frozen=True)
class Program:
    """A loop with a checkpoint after one of its steps.

    Attributes:
        optimizer: of the model.
        shuffle: the loader does.
        of_rank: there are dropout and BatchNorm, which make of a rank's samples something of its own.
        workers: of the loader.
        at: the step behind which a checkpoint is taken.
    """

    optimizer: Callable[[nn.Module], Optimizer] = adam
    shuffle: bool = True
    of_rank: bool = False
    workers: int = 0
    at: int = 10

    def __call__(self, folder: Path | None, stop: bool) -> list[Any]:
        """Run it from its newest checkpoint to its end, or until there is one; return what it ends with."""
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5)
        middle = [CountingNorm(6), nn.Dropout(0.3)] if self.of_rank else [nn.Tanh()]
        model = nn.Sequential(nn.Linear(FEATURES, 6), *middle, nn.Linear(6, CLASSES)).double()
        model, optimizer = distribute.distribute(model, self.optimizer(model))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9, 12], 0.5)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        run = None if folder is None else distribute.checkpoints(folder, scheduler=scheduler, ema=ema)
        step = run.restore() if run else 0
        first = run.values.get("epoch", 0) if run else 0
        loader = DataLoader(samples(COUNT + 2 * self.of_rank), SIZE, shuffle=self.shuffle, **by(self.workers))
        for epoch in range(first, EPOCHS):
            for inputs, targets in distribute.shard(loader):
                optimizer.zero_grad()
                fit(model, inputs, targets).backward()
                optimizer.step()
                scheduler.step()
                ema.update_parameters(model)
                step += 1
                if run and step == self.at:
                    assert run.save(step, epoch=epoch, wait=True)
                    if stop:
                        return []
            torch.rand(1), random.random(), np.random.rand()  # as the loop itself may
        distribute.average_buffers(model)
        return [
            {name: value.tolist() for name, value in model.state_dict().items()},
            [value.tolist() for value in ema.parameters()],
            [group["lr"] for group in optimizer.param_groups],
            [torch.rand(1).item(), random.random(), float(np.random.rand())],
        ]


Loop = Callable[[Path | None, bool], Any]
"""A loop on a rank: goes on in a folder; stops at its checkpoint, or goes to its end, which is returned."""


def _call(comm: Communicator, loop: Loop, folder: Path | None, stop: bool = False) -> Any:
    distribute._loop = OwnLoop(comm)
    try:
        with keeping_writers():
            return loop(folder, stop)
    finally:
        leave()


def interrupted(
    worlds: Worlds, loop: Loop, folder: Path, sizes: tuple[int, int]
) -> tuple[list[Any], list[Any]]:
    """What a loop ends with, never stopped and stopped; both by ranks, of these numbers."""
    before, after = sizes
    wanted = worlds.call(partial(_call, loop=loop, folder=None), before)
    worlds.call(partial(_call, loop=loop, folder=folder, stop=True), before)
    return wanted, worlds.call(partial(_call, loop=loop, folder=folder), after)


@pytest.mark.parametrize(("at", "shuffle"), [(2, True), (7, True), (10, True), (10, False)])
def test_same_ranks_end_with_the_same_bits(worlds: Worlds, tmp_path: Path, at: int, shuffle: bool) -> None:
    program = Program(shuffle=shuffle, of_rank=True, at=at)
    wanted, found = interrupted(worlds, program, tmp_path, (2, 2))
    assert found == wanted


@pytest.mark.parametrize(("before", "after", "at"), [(2, 1, 7), (2, 3, 3), (3, 2, 10), (1, 2, 10)])
def test_other_ranks_end_with_the_same_numbers(
    worlds: Worlds, tmp_path: Path, before: int, after: int, at: int
) -> None:
    wanted, found = interrupted(worlds, Program(at=at), tmp_path, (before, after))
    for one in found:
        assert differences(one, wanted[0]) == []


OPTIMIZERS = {
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": [p]} for p in model.parameters()], lr=0.01, betas=(0.8, 0.9), amsgrad=True
    ),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "muon": Muon,
    "tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_resume(worlds: Worlds, tmp_path: Path, optimizer: str) -> None:
    wanted, found = interrupted(worlds, Program(OPTIMIZERS[optimizer]), tmp_path, (2, 3))
    for one in found:
        assert differences(one, wanted[0]) == []


def test_a_checkpoint_changes_nothing(worlds: Worlds, tmp_path: Path) -> None:
    program = Program(sgd, of_rank=True, at=3)
    wanted = worlds.call(partial(_call, loop=program, folder=None), 2)
    assert worlds.call(partial(_call, loop=program, folder=tmp_path), 2) == wanted
    assert (tmp_path / "step-00000003").is_dir()


def made(*things: Any) -> list[Any]:
    torch.manual_seed(5)
    return [distribute.distribute(model := net(seed), make(model)) for seed, make in enumerate(things)]


def kept(folder: Path | None, **objects: Any) -> Checkpoints | None:
    return None if folder is None else distribute.checkpoints(folder, **objects)


def numbers(*models: nn.Module) -> list[Any]:
    return [value.tolist() for model in models for value in model.state_dict().values()]


def _two_models_and_loaders(folder: Path | None, stop: bool) -> Any:
    """As a GAN has them: two models, each with an optimizer, and two loaders at once."""
    (one, first), (other, second) = made(adam, sgd)
    run = kept(folder)
    step = run.restore() if run else 0
    real, false = (DataLoader(samples(31, seed), 6, shuffle=True, drop_last=True) for seed in (1, 2))
    for epoch in range(run.values.get("epoch", 0) if run else 0, 2):
        for (a, b), (c, d) in zip(distribute.shard(real), distribute.shard(false), strict=False):
            for model, optimizer, x, y in ((one, first, a, b), (other, second, c, d)):
                optimizer.zero_grad()
                fit(model, x, y).backward()
                optimizer.step()
            step += 1
            if run and stop and step == 7:
                run.save(step, wait=True, epoch=epoch)
                return None
    return numbers(one, other)


def _train(
    folder: Path | None, stop: bool, make: Callable[[], Iterable[Any]], at: int, before: bool = False
) -> Any:
    """Train for three epochs; save and stop after step `at`, or before the next one with its batch."""
    ((model, optimizer),) = made(adam)
    run = kept(folder)
    step = run.restore() if run else 0
    for epoch in range(run.values.get("epoch", 0) if run else 0, 3):
        for inputs, targets in distribute.shard(make()):
            if run and stop and before and step == at:
                return run.save(step, wait=True, epoch=epoch)
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
            step += 1
            if run and stop and not before and step == at:
                return run.save(step, wait=True, epoch=epoch)
    return [*numbers(model), step]


def _at_the_top(folder: Path | None, stop: bool) -> Any:
    """It saves before it trains on the batch that it has been dealt."""
    loader = DataLoader(samples(20), 4, shuffle=True)
    return _train(folder, stop, lambda: loader, at=6, before=True)


def _iterable(folder: Path | None, stop: bool) -> Any:
    """Batches without indices, which are drawn and changed at random."""
    inputs, targets = samples(20).tensors

    def drawn() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(20).split(4):
            yield inputs[rows], targets[rows]

    return _train(folder, stop, drawn, at=8)


def _workers(folder: Path | None, stop: bool) -> Any:
    """The loader has processes, which live on from epoch to epoch."""
    with children_allowed():
        loader = DataLoader(samples(20), 4, shuffle=True, **by(1), persistent_workers=True)
        return _train(folder, stop, lambda: loader, at=7)


def _generators(folder: Path | None, stop: bool) -> Any:
    """It stops between two epochs; the loader has a generator of its own, and so has the noise."""
    ((model, optimizer),) = made(adam)
    order, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    run = kept(folder, order=order, noise=noise)
    epoch = run.restore() if run else 0
    loader = DataLoader(samples(20), 4, shuffle=True, generator=order)
    while epoch < 4:
        for inputs, targets in distribute.shard(loader):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.add_(torch.randn(4, FEATURES, generator=noise, dtype=torch.float64) * 0.01)
        epoch += 1
        if run and stop and epoch == 2:
            run.save(epoch, wait=True)
            return None
    return numbers(model)


@pytest.mark.parametrize(
    ("loop", "sizes"),
    [
        *((loop, (2, 3)) for loop in (_two_models_and_loaders, _at_the_top, _iterable, _generators)),
        *((loop, (1, 1)) for loop in (_iterable, _workers)),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else str(value),
)
def test_loops_resume(worlds: Worlds, tmp_path: Path, loop: Loop, sizes: tuple[int, int]) -> None:
    wanted, found = interrupted(worlds, loop, tmp_path, sizes)
    for one in found:
        assert one == wanted[0] if sizes[0] == sizes[1] else differences(one, wanted[0]) == []


def _refusals(folder: Path, stop: bool) -> list[str]:
    """What is said when a checkpoint is asked for at the wrong moment."""
    said: list[str] = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(BadOption) as error:
            call()
        said.append(str(error.value))

    ((model, optimizer),) = made(adam)
    run = distribute.checkpoints(folder)
    assert run.restore() == 0
    for inputs, targets in distribute.shard(batches()):
        fit(model, inputs, targets).backward()
        optimizer.step()
        refused(run.restore)
        refused(lambda: run.save(-1))
        refused(lambda: run.save(2, loss=model.forward))
        refused(lambda: distribute.checkpoints(folder, optimizer=optimizer))
        refused(lambda: distribute.checkpoints(folder, loader=batches()))
        refused(lambda: distribute.checkpoints(folder, epoch=3))
        refused(lambda: distribute.checkpoints(folder, keep=0))
        break
    made(sgd)
    refused(lambda: run.save(3))
    distribute._loop.steppers.pop()
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_at_the_wrong_moment_is_refused(worlds: Worlds, tmp_path: Path, size: int) -> None:
    for said in worlds.call(partial(_call, loop=_refusals, folder=tmp_path), size):
        beginnings = [
            "restore() is called inside of a loop over tutti.shard()",
            "save() is given step -1",
            "save()'s values['loss'] is of type method",
            "'optimizer' of tutti.checkpoints() was given to distribute()",
            "'loader' of tutti.checkpoints() is of type DataLoader",
            "'epoch' of tutti.checkpoints() is of type int",
            "keep is 0",
            "tutti.checkpoints() was called before distribute()",
        ]
        assert len(said) == len(beginnings)
        for sentence, beginning in zip(said, beginnings, strict=True):
            assert sentence.startswith(beginning)


def _other_order(folder: Path | None, stop: bool) -> Any:
    """The sampler has random numbers of its own, which nobody keeps."""
    ((model, optimizer),) = made(adam)
    run = kept(folder)
    assert run is not None
    run.restore()
    loader = DataLoader(samples(20), 4, sampler=random.Random(stop).sample(range(20), 20))  # type: ignore[arg-type]
    for step, (inputs, targets) in enumerate(distribute.shard(loader), 1):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
        if stop and step == 3:
            run.save(step, wait=True)
            return None
    return None


def test_another_order_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds.call(partial(_call, loop=_other_order, folder=tmp_path, stop=True), 1)
    with pytest.raises(BadOption, match="sampler gives other samples than before"):
        worlds.call(partial(_call, loop=_other_order, folder=tmp_path), 1)


def _two_saved(folder: Path | None, stop: bool) -> Any:
    ((model, optimizer),) = made(adam)
    run = kept(folder)
    assert run is not None
    with redirect_stderr(StringIO()) as said:
        step = run.restore()
    found = step, run.values, said.getvalue()
    if stop:
        for step in (1, 2):
            optimizer.zero_grad()
            fit(model, *samples(4)[:]).backward()
            optimizer.step()
            values = {
                "pair": (step, 0.5),
                "table": {1: torch.arange(3)},
                "mean": np.float64(0.25),
                "no": None,
            }
            run.save(step, score=-step, wait=True, **values)
    return found


def test_a_damaged_checkpoint_is_passed_over(worlds: Worlds, tmp_path: Path) -> None:
    two = partial(_call, loop=_two_saved, folder=tmp_path)
    assert worlds.call(partial(two, stop=True), 2) == [(0, {}, "")] * 2
    path = tmp_path / "step-00000002" / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for step, values, said in worlds.call(two, 1):
        assert (step, values.pop("table")[1].tolist()) == (1, [0, 1, 2])
        assert values == {"pair": [1, 0.5], "mean": 0.25, "no": None}
        assert "rank-00001.safetensors has other contents than were written" in said


def test_where_no_checkpoint_is_whole_all_ranks_are_told_so(worlds: Worlds, tmp_path: Path) -> None:
    two = partial(_call, loop=_two_saved, folder=tmp_path / "of" / "runs")
    worlds.call(partial(two, stop=True), 2)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"")
    for told in worlds.outcomes(two, 2):
        assert isinstance(told, BadCheckpoint)
        assert "has no checkpoint that is whole" in str(told)


def test_a_checkpoint_of_a_command_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        with Saver(comm, tmp_path) as saver:
            saver.save(3, State())

    VirtualWorld(1).run(save)
    with pytest.raises(BadCheckpoint, match=r"was written by 'tutti train'; give .* another folder"):
        worlds.call(partial(_call, loop=_two_saved, folder=tmp_path), 1)


def _drawing(folder: Path | None, stop: bool) -> Any:
    """Each rank has random numbers of torch of its own, and all have the same of Python."""
    made(adam)
    run, rank = kept(folder), distribute._current().comm.rank
    assert run is not None
    torch.manual_seed(rank if stop else 100 + rank)
    random.seed(5 if stop else 6)
    if stop:
        run.save(1, wait=True)
    else:
        run.restore()
    return torch.rand(1).item(), random.random()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_other_ranks_resume_equal_random_numbers_and_the_first_ranks(
    worlds: Worlds, tmp_path: Path, before: int, after: int
) -> None:
    wanted = worlds.call(partial(_call, loop=_drawing, folder=tmp_path, stop=True), before)
    found = worlds.call(partial(_call, loop=_drawing, folder=tmp_path), after)
    assert found[0] == wanted[0]
    for rank, (own, shared) in enumerate(found[1:], 1):
        torch.manual_seed(100 + rank)
        assert own == torch.rand(1).item()
        assert shared == wanted[0][1]


def _apart(folder: Path | None, stop: bool) -> list[str]:
    """What is said where ranks save after other steps, and in other loops."""
    made(adam)
    run, rank, said = kept(folder), distribute._current().comm.rank, []
    assert run is not None
    with pytest.raises(BadOption) as refused:
        run.save(rank)
    said.append(str(refused.value))
    for _ in distribute.shard(batches()):
        if rank:
            break
        with pytest.raises(BadOption) as refused:
            run.save(1)
        break
    if rank:
        with pytest.raises(BadOption) as refused:
            run.save(1)
    return [*said, str(refused.value)]


def test_ranks_save_after_the_same_steps_in_the_same_loops(worlds: Worlds, tmp_path: Path) -> None:
    for steps, loops in worlds.call(partial(_call, loop=_apart, folder=tmp_path), 2):
        assert "save() is given different steps, by rank [0, 1]" in steps
        assert "in different numbers of loops" in loops


def _another(folder: Path, stop: bool, model: nn.Module, names: tuple[str, ...]) -> Any:
    optimizer = distribute.distribute(model, adam(model))[1]
    run = distribute.checkpoints(
        folder, **{name: torch.optim.lr_scheduler.StepLR(optimizer, 2) for name in names}
    )
    with redirect_stderr(StringIO()) as said:
        found = run.restore()
    run.save(1, wait=True)
    return found, said.getvalue()


def test_another_program_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    def on_two(model: nn.Module, *names: str) -> list[tuple[int, str]]:
        loop = partial(_another, model=model, names=names)
        return worlds.call(partial(_call, loop=loop, folder=tmp_path), 2)

    assert on_two(net(), "scheduler") == [(0, "")] * 2
    with pytest.raises(BadCheckpoint, match=r"state of scheduler, which tutti.checkpoints\(\) was not given"):
        on_two(net())
    wider = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    with pytest.raises(BadCheckpoint, match=r"'0\.bias'"):
        on_two(wider, "scheduler")
    (step, said), _ = on_two(net(), "scheduler", "other")
    assert step == 1
    assert said == "tutti: warning: the checkpoint has no state of other\n"


def test_a_folder_is_for_one_program(worlds: Worlds, tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(BadRunFolder, match=str(tmp_path)):
        worlds.call(partial(_call, loop=_two_saved, folder=tmp_path, stop=True), 2)
