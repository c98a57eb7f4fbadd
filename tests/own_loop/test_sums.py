"""Losses that are sums over samples, beside losses that are means."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.own_loop.jobs import differences
from tests.own_loop.loops.base import fit, net, samples, sgd, weights
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.experiments import dealing, own_loop


def _train(comm: Communicator | None, count: int, batch_size: int) -> list[dict[str, Tensor]]:
    first, second = net(), net(4)
    optimizers = [sgd(first), sgd(second)]
    loader = DataLoader(samples(count), batch_size)
    if comm is not None:
        own_loop._job = dealing.OwnLoop(comm, dealing.Dealt(1, comm.size))
        own_loop.distribute(first, optimizers[0])
        own_loop.distribute(second, optimizers[1], reduction="sum")
    for inputs, targets in loader if comm is None else own_loop.shard(loader):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean = fit(first, inputs, targets)
        total = nn.functional.cross_entropy(second(inputs), targets, reduction="sum")
        (mean + total).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(first, second)


@pytest.mark.parametrize(
    ("count", "batch_size"), [(8, 4), (11, 4), (9, 4)], ids=["even", "uneven", "one left"]
)
def test_a_sum_beside_a_mean_is_that_of_the_whole_batch(worlds: Worlds, count: int, batch_size: int) -> None:
    wanted = _train(None, count, batch_size)
    for found in worlds.call(lambda comm: _train(comm, count, batch_size), 2):
        assert differences(found, wanted) == []
    assert differences(weights(net(), net(4)), wanted)
