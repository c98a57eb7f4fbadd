"""Loading weights drops what a strategy remembers of the gradients of others."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim

from tests.own_loop.jobs import Distributed, differences
from tests.own_loop.loops.base import net, train, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Sync
from tutti.strategies.base import Clip
from tutti.strategies.placement import place


def plain_sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def _two_ways(comm: Communicator, strategy: Sync) -> list[list[dict[str, Tensor]]]:
    """What an epoch makes of weights: new ones, those of a model that was trained before, and its own."""
    job = Distributed(comm, strategy)
    begin = net().state_dict()
    fresh = net()
    fresh, fresh_optimizer = job.distribute(fresh, plain_sgd(fresh))
    used = net(4)
    used, used_optimizer = job.distribute(used, plain_sgd(used))
    train(job, used, used_optimizer, epochs=1)
    going_on = copy.deepcopy(used)
    used.load_state_dict(begin)
    train(job, fresh, fresh_optimizer, epochs=1)
    train(job, used, used_optimizer, epochs=1)
    return [weights(fresh), weights(used), weights(going_on)]


@pytest.mark.parametrize(
    "options",
    [{"compress": "top_k", "keep": 0.1}, {"compress": "int8"}, {"compress": "power_sgd", "rank": 1}],
    ids=str,
)
def test_compression_forgets_what_it_has_left_out(worlds: Worlds, options: dict) -> None:
    strategy = Sync(compress_inside=True, **options)
    for fresh, used, going_on in worlds.call(partial(_two_ways, strategy=strategy), 2):
        assert differences(used, fresh) == []
        assert differences(going_on, fresh) != []


def _sets_gradients(comm: Communicator) -> tuple[bool, list[list[Tensor]]]:
    """What the optimizer gets of gradients that the loop sets alike on all ranks, after a `backward()`."""
    job = Distributed(comm, Sync(compress="top_k", keep=0.1, compress_inside=True))
    model = net()
    model, optimizer = job.distribute(model, plain_sgd(model))
    train(job, model, optimizer, epochs=1)
    found = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return job.moved, found


def test_gradients_that_are_set_alike_are_not_compressed(worlds: Worlds) -> None:
    for moved, found in worlds.call(_sets_gradients, 2):
        assert moved
        assert all(bool((gradient == 1).all()) for gradients in found for gradient in gradients)


def _adopting_worker(comm: Communicator, strategy: Sync, adopts: bool) -> list[dict[str, Tensor]]:
    model = net()
    replica = place(model, comm, strategy.home)
    worker = strategy.worker(replica, comm, plain_sgd(model), Clip())
    for step in range(3):
        _gradient(replica, comm.rank, step)
        worker.step()
    if adopts:
        worker.adopt()
    before = weights(model)[0]
    for flat in replica.flats:
        flat.grads.zero_()
    worker.step()
    comm.barrier()
    return [{name: now - before[name] for name, now in weights(model)[0].items()}]


def _gradient(replica: Replica, rank: int, step: int) -> None:
    for flat in replica.flats:
        for span in flat.spans:
            flat.grads[span] = (flat.weights[span] + rank).sin() * (step + 1)


@pytest.mark.parametrize(("inside", "ranks_per_host"), [(True, None), (False, 1)])
def test_a_step_without_gradients_moves_nothing_once_the_weights_are_others(
    inside: bool, ranks_per_host: int | None
) -> None:
    strategy = Sync(compress="top_k", keep=0.1, compress_inside=inside)
    world = VirtualWorld(2, ranks_per_host)
    for (moves,) in world.run(_adopting_worker, strategy, True):
        assert not any(move.any() for move in moves.values())
    for (moves,) in world.run(_adopting_worker, strategy, False):
        assert any(move.any() for move in moves.values())
