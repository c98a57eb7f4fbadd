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
from tutti.own_loop.loop import OwnLoop
from tutti.strategies import Hogwild, Local, Strategy, Sync

Loop = Callable[[Communicator, nn.Module, torch.optim.Optimizer], None]


def begin(comm: Communicator, strategy: Strategy | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    distribute._loop = OwnLoop(comm)
    model = net()
    return distribute.distribute(model, sgd(model), strategy)


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


def refusal(comm: Communicator, way: Loop, strategy: Strategy | None = None) -> str:
    """What a rank is told that goes its way."""
    try:
        way(comm, *begin(comm, strategy))
    except BadOption as error:
        return str(error)
    finally:
        distribute._loop = None
    return "nothing"


def averages_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    distribute.mean(1.0)


def finishes_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    distribute.finish(model)


def evaluates_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    with distribute.settled(model):
        pass


def loads_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    next(iter(distribute.shard(batches())))


def distributes_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    other = net()
    distribute.distribute(other, sgd(other))


def leaves_a_batch_out(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(comm, model, optimizer, 5, out=3 if comm.rank == 1 else -1)


def begins_again_early(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Both ranks go on to their fifth batch, which is the first of an iteration on one of them."""
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    train(comm, model, optimizer, 1)


@pytest.mark.parametrize(
    ("way", "place"),
    [
        (averages_early, r"tutti.mean\(\)"),
        (finishes_early, r"tutti.finish\(\)"),
        (evaluates_early, r"tutti.settled\(\)"),
        (loads_early, r"tutti.shard\(\)"),
        (distributes_early, r"tutti.distribute\(\)"),
        (leaves_a_batch_out, r"backward\(\)"),
        (begins_again_early, r"tutti.shard\(\)"),
    ],
)
def test_all_ranks_are_told_who_is_where(worlds: Worlds, way: Loop, place: str) -> None:
    told = worlds.call(partial(refusal, way=way), 2)
    assert told[0] == told[1]
    assert "after 3 steps: " in told[0]
    assert re.search(r"rank 0 is in backward\(\) \(test_ways_apart.py, line \d+, training batch 4\)", told[0])
    assert re.search(rf"rank 1 is in {place} \([\w.]+, line \d+, training batch \d\)", told[0])


def test_ranks_at_the_same_place_are_named_together(worlds: Worlds) -> None:
    told = worlds.call(partial(refusal, way=averages_early), 3)
    assert re.search(r"rank 0 is in backward.*; ranks 1 and 2 are in tutti.mean", told[2])


@pytest.mark.parametrize(
    ("way", "place"), [(loads_early, "shard"), (evaluates_early, "settled"), (finishes_early, "finish")]
)
def test_workers_that_average_their_weights_are_told_so_at_the_next_exchange(
    worlds: Worlds, way: Loop, place: str
) -> None:
    """Rank 0 has not left the loop when it waits for rank 1's weights, which is elsewhere."""
    told = worlds.outcomes(partial(refusal, way=way, strategy=Local(every=5)), 2)
    lines = [
        re.search(r"rank (\d) is in ([\w.]+)\(\) \(\w+\.py, line \d+\) after (\d) steps", str(one))
        for one in told
    ]
    first, second = (line and line.groups() for line in lines)
    # The first message for the other's next samples is as good as one for its weights.
    assert first in [("0", "optimizer.step", "4"), ("0", "tutti.shard", "5")]
    assert second == ("1", f"tutti.{place}", "3")
    assert all("tutti.mean(loss)" in str(one) for one in told)


def _leave(comm: Communicator, strategy: Strategy) -> None:
    model, optimizer = begin(comm, strategy)
    train(comm, model, optimizer, 5 if comm.rank == 0 else 3)
    if comm.rank == 1:
        comm.close()
    else:
        train(comm, model, optimizer, 5)


@pytest.mark.parametrize(
    ("strategy", "steps", "place", "must"),
    [
        (Sync(), 3, r"backward\(\)", "make the same steps"),
        (Local(every=4), 3, r"optimizer.step\(\)", "make the same steps"),
        (Hogwild(), 5, r"tutti.shard\(\)", r"begin the same epochs over shard\(\)"),
    ],
)
def test_whoever_waits_for_a_rank_that_left_is_told_where_that_was(
    strategy: Strategy, steps: int, place: str, must: str
) -> None:
    with World(2) as world:
        world.start(_leave, strategy)
        world.outcome(1, timeout_s=40)
        told = world.outcome(0, timeout_s=40)
    assert isinstance(told, PeerLost)
    assert told.ranks == [1]
    here = rf"rank 0 is in {place} \([\w.]+, line \d+\) after {steps} steps of its own"
    assert re.search(f"{here}, and every rank must {must}", told.why)


def _look_alone(comm: Communicator) -> int:
    return OwnLoop(comm).comm.size if comm.rank == 1 else 0


def test_a_rank_may_look_who_is_there_without_the_others(worlds: Worlds) -> None:
    assert worlds.call(_look_alone, 2) == [0, 2]
