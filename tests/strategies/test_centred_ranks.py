"""The strategies with a centre on real ranks: processes of one host, and hosts joined by MPI."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import cloudpickle
import pytest
import torch
from torch import Tensor

from tests.comm.ranks import World
from tests.strategies.alone import Setting, batch, run, train
from tutti.comm.base import Communicator, keep_servers
from tutti.strategies import EASGD, GEM, Downpour, Lazy, ParamServer, Strategy

# The ranks cannot import this page by its name: its functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

STRATEGIES = [
    Downpour(),
    Downpour(side="worker", push_every=2),
    EASGD(every=2),
    EASGD(every=2),
    GEM(),
    Lazy(slack=1, threshold=0.1),
    ParamServer(),
    ParamServer(quorum=0.5),
]
STEPS = 60


def setting(strategy: Strategy, steps: int = STEPS, workers: int = 3) -> Setting:
    if isinstance(strategy, ParamServer):  # its gradient is the sum of the workers' shares
        return Setting(strategy, lambda module: torch.optim.SGD(module.parameters(), 0.1 / workers), steps)
    return Setting(strategy, steps=steps, settle_at=steps // 2)


def optimum(workers: int) -> Tensor:
    """Where the mean of all workers' losses is smallest."""
    batches = [batch(rank, step) for rank in range(workers) for step in range(STEPS)]
    total = sum((curvature * minimum for curvature, minimum in batches), torch.zeros(5).double())
    return total / sum((curvature for curvature, _ in batches), torch.zeros(5).double())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(3) as world:
        yield world


def with_servers(comm: Communicator, of: Setting, servers: int) -> object:
    return train(keep_servers(comm, servers), of)


@pytest.mark.parametrize("servers", [0, 1], ids=["shared", "served"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_processes_learn_and_agree(world: World, strategy: Strategy, servers: int) -> None:
    found = [one for one in world.run(with_servers, setting(strategy), servers) if one is not None]
    for outcome in found:
        assert torch.equal(outcome.final, found[0].final)
        assert outcome.traffic.exchanges > 0
    # Noise of the batches is all that is left between the weights and the optimum.
    assert (found[0].final - optimum(3)).abs().max() < 1.2


@pytest.mark.parametrize("servers", [0, 1], ids=["shared", "served"])
def test_all_gradients_of_processes_make_the_sequential_step(world: World, servers: int) -> None:
    of = replace(setting(ParamServer()), steps=20)
    found = world.run(with_servers, of, servers)
    expected = run(replace(of, speeds=of.speeds[: 3 - servers]))
    torch.testing.assert_close(found[0].final, expected[0].final, rtol=1e-9, atol=1e-12)
