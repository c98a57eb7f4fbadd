"""In a centre, too, an optimizer leaves parameters as they are that an update brings no gradient for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.optim.test_missing import (
    OPTIMIZERS,
    USED,
    MakeOptimizer,
    backward,
    batch,
    build,
    by_torch,
    heads_of,
    weights_of,
)
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Downpour, Lazy, ParamServer, Strategy
from tutti.strategies.base import Clip
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place


def alike(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-12)


def together(comm: Communicator, strategy: Centred, make: MakeOptimizer, used: str) -> Tensor | None:
    """As in `tests.optim.test_missing`: ranks make each update together, some without samples."""
    model = build()
    optimizer = make(model.parameters())
    if comm.servers is not None and comm.servers.serving:
        strategy.serve(comm.servers, Replica(model), optimizer, Clip())
        return None
    worker = strategy.worker(place(model, comm, strategy.home), comm, optimizer, Clip())
    for step, heads in enumerate(used):
        own = [n for n in range(7) if n % comm.size == (comm.rank + step) % comm.size]
        if comm.size > 1 and step % 3 == 2:
            own = [n for n in range(7) if n % (comm.size - 1) == comm.rank - 1]
        worker.share = len(own) / 7
        if own:
            backward(model, batch(step)[own], heads_of(heads), 7)
        worker.step()
    worker.finish()
    return weights_of(model)


@pytest.mark.parametrize("used", USED.values(), ids=USED)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"rebinding"}))
def test_a_parameter_server_follows_plain_torch(name: str, used: str) -> None:
    make = OPTIMIZERS[name]
    expected = by_torch(make, used)
    for found in VirtualWorld(2).run(together, ParamServer(), make, used):
        assert alike(found, expected)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_servers_follow_plain_torch(name: str, servers: int) -> None:
    make = OPTIMIZERS[name]
    expected = by_torch(make, "bb*aab")
    found = VirtualWorld(3, servers=servers).run(together, ParamServer(), make, "bb*aab")
    assert sum(weights is not None for weights in found) == 3
    assert all(alike(weights, expected) for weights in found if weights is not None)


def on_their_own(comm: Communicator, strategy: Strategy, make: MakeOptimizer, used: list[str]) -> Tensor:
    """Each worker uses heads of its own; they need 2 and 3 seconds for a batch."""
    model = build()
    worker = strategy.worker(place(model, comm, strategy.home), comm, make(model.parameters()), Clip())
    for step, heads in enumerate(used[comm.rank]):
        backward(model, batch(10 * comm.rank + step), heads_of(heads), 7)
        comm.compute(2.0 + comm.rank)
        worker.step()
    worker.finish()
    return weights_of(model)


def by_hand(make: MakeOptimizer, used: list[str]) -> Tensor:
    """One optimizer for both workers' gradients, each of which is computed at what its worker has pulled."""
    centre, workers = build(), [build(), build()]
    optimizer = make(centre.parameters())
    ends = sorted(
        ((2.0 + rank) * (step + 1), rank, step)
        for rank, heads in enumerate(used)
        for step in range(len(heads))
    )
    for _, rank, step in ends:
        own = workers[rank]
        own.zero_grad()
        backward(own, batch(10 * rank + step), heads_of(used[rank][step]), 7)
        for parameter, theirs in zip(centre.parameters(), own.parameters(), strict=True):
            parameter.grad = theirs.grad
        optimizer.step()
        own.load_state_dict(centre.state_dict())
    return weights_of(centre)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"rebinding"}))
def test_workers_with_different_heads_follow_one_optimizer(name: str) -> None:
    """The second worker's speed keeps the two from ever coming at the same moment."""
    make, used = OPTIMIZERS[name], ["aabaa", "b"]
    for found in VirtualWorld(2).run(on_their_own, Downpour(), make, used):
        assert alike(found, by_hand(make, used))


@pytest.mark.parametrize("strategy", [Downpour(), Lazy(), Lazy(slack=0), ParamServer()], ids=str)
@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_a_single_worker_follows_plain_torch(strategy: Strategy, used: str) -> None:
    make = OPTIMIZERS["adamw"]
    (found,) = VirtualWorld(1).run(on_their_own, strategy, make, [used])
    assert alike(found, by_torch(make, used))


def by_pairs_in_centre(comm: Communicator, strategy: Strategy, make: MakeOptimizer) -> Tensor:
    model = build()
    worker = strategy.worker(place(model, comm, strategy.home), comm, make(model.parameters()), Clip())
    for step, heads in (use for pair in PAIRS for use in pair):
        backward(model, batch(step), heads, 7)
        worker.step()
    worker.finish()
    return weights_of(model)


def test_parameters_used_by_one_of_several_pushed_batches_are_moved() -> None:
    """Two batches make a push: of the heads `ab`, `bb` and `aa`, the last two leave one alone."""
    make = OPTIMIZERS["momentum"]
    strategy = Downpour(push_every=2, pull_every=2)
    (found,) = VirtualWorld(1).run(by_pairs_in_centre, strategy, make)
    centre, worker = build(), build()
    optimizer = make(centre.parameters())
    for pair in PAIRS:
        worker.load_state_dict(centre.state_dict())
        optimizer.zero_grad()
        for step, heads in pair:
            worker.zero_grad()
            backward(worker, batch(step), heads, 7)
            with torch.no_grad():
                for own, summed in zip(worker.parameters(), centre.parameters(), strict=True):
                    if own.grad is not None:
                        summed.grad = own.grad.clone() if summed.grad is None else summed.grad + own.grad
                        own.sub_(own.grad, alpha=0.05)
        optimizer.step()
    assert alike(found, weights_of(centre))


PAIRS = [[(0, "a"), (1, "b")], [(2, "b"), (3, "b")], [(4, "a"), (5, "a")]]
