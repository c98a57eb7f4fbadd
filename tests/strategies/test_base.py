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
from tutti.strategies import STRATEGIES, Clip, Strategy, WeightPlacement, Worker
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
