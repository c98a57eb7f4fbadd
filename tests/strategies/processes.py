"""What the ranks of the tests of workers with own weights run."""

from __future__ import annotations

import torch
from torch import nn, optim

from tests.strategies.alone import Point, batch
from tutti.comm.base import Communicator
from tutti.strategies import ADPSGD, Clip, DiLoCo, Gossip, Hogwild, Local, Strategy
from tutti.strategies.placement import place

STEPS = 40

STRATEGIES: dict[str, Strategy] = {
    "local": Local(every=3, after=4),
    "diloco": DiLoCo(every=6),
    "gossip": Gossip(),
    "gossip-shift": Gossip("shift_one"),
    "adpsgd": ADPSGD(),
    "hogwild": Hogwild(),
}
EXACT = ("local", "diloco", "gossip", "gossip-shift")
"""Those whose outcome does not depend on who is faster."""


def train(comm: Communicator, strategy: Strategy) -> list[float]:
    """The final weights."""
    module = Point()
    replica = place(module, comm, strategy.home)
    optimizer = optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    worker = strategy.worker(replica, comm, optimizer, Clip())
    for step in range(STEPS):
        curvature, minimum = batch(comm.rank, step % 4)
        (curvature / 2 * (module() - minimum) ** 2).sum().backward()
        worker.step()
        if step == STEPS // 2:
            worker.settle()
            evaluated = comm.all_gather_objects(module().tolist())
            assert all(other == evaluated[0] for other in evaluated)
            worker.resume()
    worker.finish()
    return module().tolist()


def train_with_all(comm: Communicator) -> dict[str, list[float]]:
    """The final weights, by strategy."""
    return {name: train(comm, strategy) for name, strategy in STRATEGIES.items()}


def large(comm: Communicator, strategy: Strategy, width: int = 700) -> float:
    """Train a vector that no buffer of a message holds; the largest difference to rank 0 in the end."""
    torch.manual_seed(0)
    module = nn.Linear(width, width)
    replica = place(module, comm, strategy.home)
    worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=0.01), Clip())
    for step in range(15):
        inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(100 * comm.rank + step))
        module(inputs).square().mean().backward()
        worker.step()
    worker.finish()
    first = module.weight.detach().clone().view(-1)
    comm.broadcast(first)
    return (module.weight.detach().view(-1) - first).abs().max().item()
