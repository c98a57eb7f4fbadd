"""`settled`, `finish` and the passes behind an update leave what plain torch has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import fit, net, samples, sgd, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.origins import SampleCounts
from tutti.strategies import Sync

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
EVERY = 3


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    fit(model, *batch).backward()
    optimizer.step()


def loader() -> DataLoader:
    """Batches of 3, 3, 3 and 2 samples."""
    return DataLoader(samples(11), 3)


def plain(batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    model = net()
    optimizer = sgd(model)
    for batch in batches:
        update(model, optimizer, batch)
    return weights(model)


def _settled(comm: Communicator) -> list[list[dict[str, Tensor]]]:
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    model = net()
    model, optimizer = distribute.distribute(model, sgd(model))
    inside = []
    for _ in range(2):
        for batch in distribute.shard(loader()):
            update(model, optimizer, batch)
        with distribute.settled(model):
            inside.append(weights(model))
    distribute.finish(model)
    return [*inside, weights(model)]


@SIZES
def test_settled_and_finished_weights_are_those_of_the_updates_so_far(worlds: Worlds, size: int) -> None:
    batches = list(loader())
    wanted = [plain(batches), plain(batches * 2), plain(batches * 2)]
    for found in worlds.call(_settled, size):
        assert differences(found, wanted) == []


def _accumulated(comm: Communicator) -> list[dict[str, Tensor]]:
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    model = net()
    model, optimizer = distribute.distribute(model, sgd(model), Sync(every=EVERY))
    for batch in distribute.shard(loader()):
        update(model, optimizer, batch)
    distribute.finish(model)
    return weights(model)


@SIZES
def test_the_passes_that_are_left_over_make_the_last_update(worlds: Worlds, size: int) -> None:
    """Three batches are behind the first update; `finish` makes one of the fourth."""
    inputs, targets = samples(11).tensors
    wanted = plain([(inputs[:9], targets[:9]), (inputs[9:], targets[9:])])
    for found in worlds.call(_accumulated, size):
        assert differences(found, wanted) == []


def _scaled(comm: Communicator) -> list[dict[str, Tensor]]:
    """The scale doubles from pass to pass, and the second pass overflows."""
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    model = net()
    model, optimizer = distribute.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), Sync(every=EVERY)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for number, batch in enumerate(distribute.shard(loader())):
        optimizer.zero_grad()
        scaler.scale(fit(model, *batch) * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


@SIZES
def test_each_pass_behind_an_update_is_unscaled_by_its_own_scale(worlds: Worlds, size: int) -> None:
    batches = [batch for number, batch in enumerate(loader()) if number != 1]
    model = net()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    update(model, torch.optim.SGD(model.parameters(), lr=0.1), (inputs, targets))
    for found in worlds.call(_scaled, size):
        assert differences(found, weights(model)) == []
