"""What a strategy and its worker are where they do not say otherwise."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.trainers import Forgetful
from tutti import strategies
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


def test_no_module_of_the_strategies_imports_a_strategy() -> None:
    named = {STRATEGIES[name].__module__ for name in STRATEGIES}
    folder = Path(strategies.__file__).parent
    for file in folder.glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        imported = {name for node in nodes for name in (node.module, *_members(node))}
        assert file.name == "__init__.py" or not imported & named, file


def _members(node: ast.ImportFrom) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names]


def test_a_strategy_makes_one_pass_and_exchanges_in_every_step() -> None:
    assert (Plain().passes, Plain().period) == (1, 1)
    assert not Plain.joint_norm
    assert not Plain.joins_gradients


def test_some_strategies_join_gradients_or_norms() -> None:
    assert {name for name, strategy in STRATEGIES.items() if strategy().joins_gradients} == {"solo", "sync"}
    assert {name for name, strategy in STRATEGIES.items() if not strategy().joint_norm} == {"paramserver"}


def test_a_strategy_runs_anywhere_without_servers_on_two_levels_at_the_most() -> None:
    Plain().check(workers=1000, hosts=100, levels=2)
    with pytest.raises(BadOption, match="'plain'"):
        Plain().check(workers=4, levels=3)
    with pytest.raises(BadOption, match="--servers is 1"):
        Plain().check(workers=4, servers=1)


def test_a_strategy_that_does_more_than_to_join_gradients_joins_none() -> None:
    def program(comm: Communicator) -> None:
        Plain().joint(place(nn.Linear(1, 1), comm, Home.PRIVATE), comm)

    with pytest.raises(NotImplementedError, match="'plain'"):
        VirtualWorld(1).run(program)


def test_a_worker_has_a_whole_batch_and_is_never_late() -> None:
    worker = Idle()
    assert (worker.share, worker.weight, worker.divides, worker.is_late()) == (1.0, None, False, False)


@pytest.mark.parametrize(
    ("name", "options", "period"),
    [
        ("local", {"every": 5}, 5),
        ("local", {"every": 5, "after": 1}, 1),
        ("diloco", {"every": 5}, 5),
        ("gossip", {"every": 5}, 5),
        ("adpsgd", {"every": 5}, 5),
        ("easgd", {"every": 5}, 5),
        ("easgd_sync", {"every": 5}, 5),
        ("downpour", {"push_every": 5, "pull_every": 2}, 5),
        ("sync", {"every": 5}, 1),
        ("hogwild", {}, 1),
    ],
)
def test_after_a_period_a_worker_has_exchanged_something(
    name: str, options: dict[str, int], period: int
) -> None:
    strategy = STRATEGIES[name](**options)
    assert strategy.period == period

    def exchanges(comm: Communicator) -> int:
        module = nn.Linear(2, 1)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        for _ in range(strategy.period):
            comm.compute(1.0)
            replica.flats[0].grads.fill_(1.0)
            worker.step()
        return worker.traffic.exchanges

    assert min(VirtualWorld(2).run(exchanges)) > 0


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
