"""Averages of the weights: what torch's `AveragedModel` gives, on any number of ranks and by any strategy."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.comm.ranks import World
from tests.contracts.strategy import NAMES, brisk
from tests.training.blobs import blobs
from tests.training.test_batch_norm import network, trained
from tests.training.test_ending import Run, losses, outcome, same
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import Batches, Part
from tutti.strategies import STRATEGIES
from tutti.training.stopping import Ending

PART = Part(blobs(50).stored_inputs.double(), blobs(50).stored_targets)
"""With a last batch of two samples, fewer than three ranks."""


def by_torch() -> dict[str, Tensor]:
    """A plain loop of 4 epochs."""
    module = network()
    optimizer, batches = SGD(module.parameters(), lr=0.1), Batches(PART, 12, seed=5)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for epoch in range(4):
        for rows in batches.order(epoch).split(12):
            inputs, targets = PART.take(rows)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            averaged.update_parameters(module)
    return averaged.module.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_averages_are_those_of_torch(ranks: int) -> None:
    run = partial(trained, part=PART, ending=Ending(average=0.9))
    with World(ranks) if ranks > 1 else closing(HostCommunicator.alone()) as world:
        found = world.run(run) if isinstance(world, World) else [run(world)]
    for name, value in by_torch().items():
        for one in found if value.is_floating_point() else ():
            torch.testing.assert_close(one[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_an_average_is_judged_and_training_goes_on_as_without(name: str) -> None:
    run = Run(brisk(STRATEGIES[name]), lr=1.0)
    plain, ended = outcome(run), outcome(replace(run, average=0.9, restores_best=True))
    assert [one.train for one in ended.history] == [one.train for one in plain.history]
    assert losses(ended.history)[3:] != losses(plain.history)[3:]
    assert ended.final is not None
    assert ended.final.loss == ended.found.loss == min(losses(ended.history))
    assert same(ended.written, ended.weights)


def test_workers_with_their_own_weights_average_the_settled_ones() -> None:
    run, decay = Run(brisk(STRATEGIES["local"]), epochs=2), 0.99
    first, second = (outcome(replace(run, epochs=epochs)) for epochs in (1, 2))
    found = outcome(replace(run, average=decay)).weights
    updates = second.history[1].step - first.history[0].step
    for name in ("0.weight", "1.bias", "3.weight"):
        wanted = torch.lerp(second.weights[name], first.weights[name], decay**updates)
        torch.testing.assert_close(found[name], wanted)
