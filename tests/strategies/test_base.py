"""What a strategy and its worker are where they do not say otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.trainers import Forgetful
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.strategies import (
    STRATEGIES,
    Clip,
    Gossip,
    Hogwild,
    Lazy,
    Local,
    NoLoCo,
    ParamServer,
    Solo,
    Strategy,
    WeightPlacement,
    Worker,
)
from tutti.strategies.placement import place


class Idle(Forgetful):
    """Does nothing."""

    def step(self) -> None: ...

    def finish(self) -> None: ...


class Plain(Strategy):
    """Says no more than it must."""

    name, home = "plain", WeightPlacement.PRIVATE

    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return Idle()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_without_a_step_leaves_the_weights_as_they_are(name: str) -> None:
    strategy = STRATEGIES[name]()

    def program(comm: Communicator) -> bool:
        module = nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
        replica = place(module, comm, strategy.home)
        strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip()).finish()
        return all(bool((parameter == 0.5).all()) for parameter in module.parameters())

    assert all(VirtualWorld(strategy.most_workers or 3).run(program))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["norm", "value"])
def test_a_clip_without_a_usable_limit_is_refused(name: str, limit: float) -> None:
    with pytest.raises(BadOption, match=f"clip_{name} is {limit!r}"):
        Clip(**{name: limit})


@pytest.mark.parametrize(
    ("strategy", "world", "words"),
    [
        (Solo(), {"workers": 2}, "runs on 1 worker, not 2; use '-n 1' or '--strategy sync'"),
        (NoLoCo(), {"workers": 1}, "needs 2 workers, not 1; use '-n 2' or more, or '--strategy solo'"),
        (Gossip("shift_one"), {"workers": 1}, "needs 2 workers, not 1"),
        (Hogwild(), {"workers": 3, "hosts": 2}, "runs on 1 host, not 2; leave --hosts out, or use"),
        (Lazy(), {"workers": 4, "hosts": 2, "servers": 1, "levels": 2}, "--levels 1"),
        (ParamServer(), {"workers": 3, "hosts": 2, "servers": 1, "levels": 2}, "--levels 1"),
    ],
)
def test_a_world_that_a_strategy_cannot_use_is_refused(
    strategy: Strategy, world: dict[str, int], words: str
) -> None:
    with pytest.raises(BadOption, match=words):
        strategy.check(**world)
    strategy.check(2) if world["workers"] == 1 else strategy.check(1)


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
@pytest.mark.parametrize(("strategy", "moves"), [(Local(every=1), [2, 2, 2]), (Gossip(), [4, 1, 1])], ids=str)
def test_workers_without_samples_take_part_in_averages(
    strategy: Strategy, moves: list[float], hosts: tuple[int, ...]
) -> None:
    """The first one makes two steps of 3; gossip averages before it steps."""

    def program(comm: Communicator) -> float:
        module = nn.Linear(1, 1, bias=False).double()
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
        before = module.weight.item()
        for _ in range(2):
            if comm.rank:
                worker.skip()
            else:
                (3 * module.weight).sum().backward()
                worker.step()
        return before - module.weight.item()

    assert VirtualWorld(3, hosts).run(program) == pytest.approx(moves)
