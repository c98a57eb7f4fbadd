"""Loops of a user's with a strategy whose workers have gradients of their own, on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from tests.own_loop.jobs import Distributed, Refused, differences, run_rank
from tests.own_loop.known import REFUSED_WITH
from tests.own_loop.loops import LOOPS
from tests.own_loop.loops.base import adam, fit, net, samples, sgd, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.strategies import (
    ADPSGD,
    DiLoCo,
    EASGDSync,
    Gossip,
    Hogwild,
    Local,
    Strategy,
)

ABREAST = (Local(every=1), DiLoCo(every=1), Gossip(), EASGDSync(every=1))


class Backwards(Sampler[int]):
    """A sampler of the user's, which may look at the training that goes on."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers[::-1])

    def __len__(self) -> int:
        return len(self.numbers)


def _drawn_one_by_one(comm: Communicator, strategy: Strategy, count: int, own: bool) -> list[Any]:
    job = Distributed(comm, strategy)
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    sampler = Backwards(range(count)) if own else None
    for _ in range(2):
        for batch in job.shard(DataLoader(samples(count), 2, sampler=sampler)):
            optimizer.zero_grad()
            fit(model, *batch).backward()
            optimizer.step()
    distribute.finish(model)
    return weights(model)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count", [11, 9])
@pytest.mark.parametrize("strategy", ABREAST, ids=lambda strategy: strategy.name)
def test_dealing_batches_does_not_get_between_the_steps(
    worlds: Worlds, strategy: Strategy, count: int, own: bool
) -> None:
    """Six batches, and five, of which the last is left out."""
    first, second = worlds.call(partial(_drawn_one_by_one, strategy=strategy, count=count, own=own), 2)
    assert differences(first, second) == []


def _leaves_one_out(comm: Communicator, strategy: Strategy) -> str:
    job = Distributed(comm, strategy)
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for number, batch in enumerate(job.shard([samples(2).tensors] * 6)):
        if comm.rank == 1 and number == 2:
            continue
        fit(model, *batch).backward()
        optimizer.step()
    try:
        distribute.finish(model)
    except BadOption as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [Local, DiLoCo, EASGDSync, Gossip], ids=lambda kind: kind.name)
def test_unequal_numbers_of_steps_are_noticed_at_the_end(worlds: Worlds, kind: type[Strategy]) -> None:
    for found in worlds.call(partial(_leaves_one_out, strategy=kind(every=7)), 2):
        assert "[3, 2]" in found


def _overflows(comm: Communicator, strategy: Strategy) -> tuple[Any, float]:
    """The first batch of rank 0 overflows, also where it is a part of everyone's."""
    job = Distributed(comm, strategy)
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    inputs, targets = samples(8).tensors
    for number, (own, labels) in enumerate(job.shard([(inputs, targets)] * 4)):
        optimizer.zero_grad()
        bad = own * torch.inf if comm.rank == 0 and number == 0 else own
        scaler.scale(fit(model, bad, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    distribute.finish(model)
    return weights(model), scaler.get_scale()


ALL: tuple[Strategy, ...] = (
    *ABREAST,
    ADPSGD(),
    Hogwild(),
)


@pytest.mark.parametrize("strategy", ALL, ids=lambda strategy: strategy.name)
def test_an_overflow_on_one_rank_leaves_finite_weights_that_moved(worlds: Worlds, strategy: Strategy) -> None:
    (first, scale), (second, other) = worlds.call(partial(_overflows, strategy=strategy), 2)
    assert differences(first, second) == []
    assert all(bool(value.isfinite().all()) for value in first[0].values())
    assert differences(first, weights(net())) != []
    assert (scale, other) == (32.0, 64.0)


def _decays_alone(comm: Communicator, strategy: Strategy) -> list[dict[str, Tensor]]:
    """A loop on the first rank, which scales its weights after each step; the other comes for the end."""
    job = Distributed(comm, strategy)
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    if comm.rank == 0:
        _decay(model, optimizer)
    distribute.finish(model)
    return weights(model)


def _decay(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(4):
        optimizer.zero_grad()
        fit(model, *samples(6).tensors).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(0.9)


def test_what_a_loop_makes_of_its_weights_reaches_all(worlds: Worlds) -> None:
    model = net()
    _decay(model, sgd(model))
    for found in worlds.call(partial(_decays_alone, strategy=Hogwild()), 2):
        assert differences(found, weights(model)) == []


REFUSABLE = [
    (strategy, loop) for strategy in ALL for loop in ("unfreezing", "adversaries_zeroed_by_optimizer")
]


@pytest.mark.parametrize(("strategy", "loop"), REFUSABLE, ids=str)
def test_what_is_refused_on_several_ranks_is_known(worlds: Worlds, strategy: Strategy, loop: str) -> None:
    """An error of ours on each rank, or an end."""
    found = worlds.outcomes(partial(run_rank, loop=LOOPS[loop], strategy=strategy), 2)
    refused = loop in REFUSED_WITH.get(strategy.name, ())
    assert [isinstance(outcome, BadOption) for outcome in found] == [refused] * 2
    assert [isinstance(outcome, BaseException) for outcome in found] == [refused] * 2


def test_workers_of_their_own_have_a_model_once(worlds: Worlds) -> None:
    def again(job: Distributed) -> None:
        model = net()
        job.distribute(model, sgd(model))
        job.distribute(model, sgd(model))

    for found in worlds.run(again, 2, Local()):
        assert isinstance(found, Refused)
        assert "belongs to a model that distribute() was given before" in found.sentence
