"""Ranks that go different ways through a loop are told where each one is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.comm.ranks import World
from tests.own_loop.loops.base import batches, fit, net, sgd
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption, PeerLost
from tutti.own_loop import distribute
from tutti.own_loop.stepper import OwnLoop

Loop = Callable[[Communicator, nn.Module, torch.optim.Optimizer], None]


def begin(comm: Communicator) -> tuple[nn.Module, torch.optim.Optimizer]:
    distribute._loop = OwnLoop(comm)
    model = net()
    return distribute.distribute(model, sgd(model))


def train(
    comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, out: int = -1
) -> None:
    """Make `steps` steps; leave out the batch of number `out`."""
    for number, (inputs, targets) in enumerate(distribute.shard(list(batches(2, 24)))):
        if number == steps:
            break
        if number != out:
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()


LATER: dict[str, Callable[[nn.Module], object]] = {
    r"tutti.mean\(\)": lambda model: distribute.mean(1.0),
    r"tutti.average_buffers\(\)": distribute.average_buffers,
    r"tutti.shard\(\)": lambda model: next(iter(distribute.shard(batches()))),
    r"tutti.distribute\(\)": lambda model: distribute.distribute(other := net(), sgd(other)),
}
"""What a rank does that makes fewer steps."""


def makes_fewer_steps(
    comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, then: str
) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    LATER[then](model)


def leaves_a_batch_out(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5, out=3 if comm.rank == 1 else -1)


def begins_again_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Both ranks go on to their fifth batch, which is the first of an iteration on one of them."""
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    train(comm, model, optimizer, 1)


def refusal(comm: Communicator, way: Loop) -> str:
    """What a rank is told that goes its way."""
    try:
        way(comm, *begin(comm))
    except BadOption as error:
        return str(error)
    finally:
        distribute._loop = None
    return "nothing"


@pytest.mark.parametrize(
    ("way", "place"),
    [
        *((partial(makes_fewer_steps, then=place), place) for place in LATER),
        (leaves_a_batch_out, r"backward\(\)"),
        (begins_again_early, r"tutti.shard\(\)"),
    ],
)
def test_all_ranks_get_the_place_of_each_rank(worlds: Worlds, way: Loop, place: str) -> None:
    told = worlds.call(partial(refusal, way=way), 2)
    assert told[0] == told[1]
    assert "after 3 steps: " in told[0]
    assert re.search(r"rank 0 is in backward\(\) \(test_ways_apart.py, line \d+, training batch 4\)", told[0])
    assert re.search(rf"rank 1 is in {place} \([\w.]+, line \d+, training batch \d\)", told[0])


def _leave(comm: Communicator) -> None:
    model, optimizer = begin(comm)
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    if comm.rank == 1:
        comm.close()
    else:
        train(comm, model, optimizer, 5)


def test_a_rank_that_waits_for_one_that_left_is_told_where_that_was() -> None:
    with World(2) as world:
        world.start(_leave)
        world.outcome(1, timeout_s=40)
        told = world.outcome(0, timeout_s=40)
    assert isinstance(told, PeerLost)
    assert told.ranks == [1]
    assert re.search(r"rank 0 is in backward\(\) \([\w.]+, line \d+\) after 3 steps", told.why)


def _look_alone(comm: Communicator) -> int:
    return OwnLoop(comm).comm.size if comm.rank == 1 else 0


def test_a_rank_may_look_without_the_others(worlds: Worlds) -> None:
    assert worlds.call(_look_alone, 2) == [0, 2]
