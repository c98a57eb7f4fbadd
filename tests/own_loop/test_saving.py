"""What a program saves of a distributed model, or copies, is as large as with plain torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.stepper import OwnLoop

SLACK = 300
"""Bytes that names in a file may differ by; the model has 80,000."""

TAKEN: dict[str, Callable[[nn.Module], object]] = {
    "a weight": lambda model: model[0].bias,
    "the data of a weight": lambda model: model[0].bias.data,
    "a gradient": lambda model: model[0].bias.grad,
    "a statistic": lambda model: model[1].running_mean,
    "a channels_last weight": lambda model: model[4].weight,
    "the weights": lambda model: model.state_dict(),
    "the model": lambda model: model,
}


def made() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(100, 100),
        nn.BatchNorm1d(100),
        nn.Linear(100, 16),
        nn.Unflatten(1, (4, 2, 2)),
        nn.Conv2d(4, 8, 2),
    )
    return model.to(memory_format=torch.channels_last)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 400).view(4, 100)).square().mean().backward()
    optimizer.step()


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def sizes(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """In bytes: saved by torch, pickled, and a copy of it saved by torch."""
    return {
        name: (len(saved(value)), len(pickle.dumps(value)), len(saved(copy.deepcopy(value))))
        for name, value in ((name, take(model)) for name, take in TAKEN.items())
    }


def _sizes(comm: Communicator) -> dict[str, tuple[int, int, int]]:
    distribute._loop = OwnLoop(comm)
    model = made()
    model, optimizer = distribute.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    return sizes(model)


@pytest.mark.parametrize("size", [1, 2])
def test_files_and_copies_are_as_large_as_with_plain_torch(worlds: Worlds, size: int) -> None:
    model = made()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wanted = sizes(model)
    for found in worlds.call(_sizes, size):
        for name, lengths in found.items():
            for seen, length in zip(lengths, wanted[name], strict=True):
                assert abs(seen - length) < SLACK, (name, lengths, wanted[name])


def _loaded(comm: Communicator) -> tuple[Tensor, list[int]]:
    distribute._loop = OwnLoop(comm)
    model = made()
    model, optimizer = distribute.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    weights = torch.load(io.BytesIO(saved(model.state_dict())))
    storages = [tensor.untyped_storage().nbytes() - tensor.nbytes for tensor in weights.values()]
    with torch.no_grad():
        weights["0.weight"].add_(1)  # no weight of the model changes by that
    return torch.stack([weights["0.weight"], model[0].weight.detach()]), storages


def test_loaded_weights_are_ordinary_tensors(worlds: Worlds) -> None:
    for both, storages in worlds.call(_loaded, 2):
        assert set(storages) == {0}
        torch.testing.assert_close(both[0] - 1, both[1], rtol=0, atol=1e-6)
