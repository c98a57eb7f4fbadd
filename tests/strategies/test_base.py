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
from tutti.strategies import STRATEGIES, Clip, Home, Strategy, Worker
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place


class Idle(Forgetful):
    """Does nothing."""

    def step(self) -> None: ...

    def finish(self) -> None: ...


class Plain(Strategy):
    """Says no more than it must."""

    name, home = "plain", Home.PRIVATE

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


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_after_the_end_an_evaluation_leaves_the_weights_as_they_are(name: str, settled: bool) -> None:
    strategy = STRATEGIES[name]()
    centred = isinstance(strategy, Centred)

    def program(comm: Communicator) -> bool:
        module = nn.Linear(2, 1)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        if comm.servers is not None and comm.servers.serving:
            assert isinstance(strategy, Centred)
            strategy.serve(comm.servers, Replica(module), optimizer, Clip())
            return True
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optimizer, Clip())
        for step in range(3):
            comm.compute(1.0 + comm.rank)
            replica.flats[0].grads.fill_(1.0 + step + comm.rank)
            worker.step()
        if settled and not centred:
            worker.settle()
        worker.finish()
        comm.barrier()
        final = replica.flats[0].weights.clone()
        if not settled:
            worker.settle()
        worker.resume()
        return torch.allclose(replica.flats[0].weights, final, rtol=1e-6)

    ranks = strategy.most_workers or 2
    assert all(VirtualWorld(ranks, servers=1 if centred else 0).run(program))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["norm", "value"])
def test_a_clip_without_a_usable_limit_is_refused(name: str, limit: float) -> None:
    with pytest.raises(BadOption, match=f"clip_{name} is {limit!r}"):
        Clip(**{name: limit})
