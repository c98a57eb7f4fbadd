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

SIZES = pytest.mark.parametrize("size", [1, 2, 3])


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
    distribute._loop = OwnLoop(comm)
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
