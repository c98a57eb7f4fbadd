"""Loading weights drops what a strategy remembers of the gradients of others."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, optim

from tests.own_loop.loops.base import net, weights
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Sync
from tutti.strategies.base import Clip
from tutti.strategies.placement import place


def plain_sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


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
