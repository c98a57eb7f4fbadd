"""Averages of the weights: what torch's `AveragedModel` gives, on any number of ranks and by any strategy."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.comm.ranks import World
from tests.contracts.strategy import NAMES, brisk
from tests.training.blobs import blobs
from tests.training.test_batch_norm import network, trained
from tests.training.test_ending import Run, losses, outcome, same
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import Batches, Part
from tutti.errors import BadOption
from tutti.strategies import STRATEGIES
from tutti.training.intervals import Averaging
from tutti.training.stopping import Ending

PART = Part(blobs(50).stored_inputs.double(), blobs(50).stored_targets)
"""With a last batch of two samples, fewer than three ranks."""


def by_torch(average: str) -> dict[str, Tensor]:
    """A plain loop of 4 epochs, of which SWA has the last 3."""
    module, ema = network(), average == "ema:0.9"
    optimizer, batches = SGD(module.parameters(), lr=0.1), Batches(PART, 12, seed=5)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None, use_buffers=ema)
    for epoch in range(4):
        for rows in batches.order(epoch).split(12):
            inputs, targets = PART.take(rows)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            if ema:
                averaged.update_parameters(module)
        if not ema and epoch > 0:
            averaged.update_parameters(module)
    if not ema:
        update_bn([PART.take(rows)[0] for rows in batches.order(0).tensor_split(5)], averaged)
    return averaged.module.state_dict()


@pytest.mark.parametrize("average", ["ema:0.9", "swa:0.5"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_averages_are_those_of_torch(ranks: int, average: str) -> None:
    run = partial(trained, part=PART, ending=Ending(average=Averaging.parse(average)))
    with World(ranks) if ranks > 1 else closing(HostCommunicator.alone()) as world:
        found = world.run(run) if isinstance(world, World) else [run(world)]
    for name, value in by_torch(average).items():
        for one in found if value.is_floating_point() else ():
            torch.testing.assert_close(one[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("average", ["ema:0.9", "swa:0.5"])
@pytest.mark.parametrize("name", NAMES)
def test_an_average_is_judged_and_training_goes_on_as_without(name: str, average: str) -> None:
    run = Run(brisk(STRATEGIES[name]), lr=1.0)
    plain, ended = outcome(run), outcome(replace(run, average=average, restores_best=True))
    assert [one.train for one in ended.history] == [one.train for one in plain.history]
    assert losses(ended.history)[3:] != losses(plain.history)[3:]
    assert ended.final is not None
    assert ended.final.loss == ended.found.loss == min(losses(ended.history))
    assert same(ended.written, ended.weights)


def test_workers_with_their_own_weights_average_the_settled_ones() -> None:
    run = Run(brisk(STRATEGIES["local"]))
    settled = [outcome(replace(run, epochs=epochs)).weights for epochs in (3, 4, 5, 6)]
    found = outcome(replace(run, average="swa:0.5")).weights
    for name in ("0.weight", "1.bias", "3.weight"):
        torch.testing.assert_close(found[name], torch.stack([one[name] for one in settled]).mean(0))


def test_a_run_that_ends_before_its_average_begins_has_the_plain_weights() -> None:
    run = Run(brisk(STRATEGIES["sync"]), ends_after=2)
    plain, ended = outcome(run), outcome(replace(run, average="swa:0.8"))
    assert same(ended.weights, plain.weights)
    assert "not averaged" in str(ended.why)


def test_an_average_of_one_is_refused() -> None:
    with closing(HostCommunicator.alone()) as comm, pytest.raises(BadOption, match=r"--average swa:0\.9"):
        trained(comm, PART, ending=Ending(average=Averaging.parse("swa:0.9")))
