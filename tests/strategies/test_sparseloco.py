"""SparseLoCo in numbers worked by hand."""

from __future__ import annotations

import torch
from torch import nn, optim

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Clip, SparseLoCo, Strategy
from tutti.strategies.placement import place

SLOPES = torch.tensor([[3.0, 2.5], [1.0, 2.0]])
"""The gradient of each worker."""


def descend(comm: Communicator, strategy: Strategy, steps: int) -> list[list[float]]:
    """SGD with rate 1; returns the weights after each step, then what is evaluated, then the gaps."""
    module = nn.ParameterList([torch.zeros(2)])
    replica = place(module, comm, strategy.home)
    worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
    found = []
    for _ in range(steps):
        (module[0] * SLOPES[comm.rank]).sum().backward()
        worker.step()
        found.append(module[0].tolist())
    worker.settle()
    return [*found, module[0].tolist(), replica.flats[0].weights[2:].unique().tolist()]


def test_numbers_worked_by_hand() -> None:
    # One of the vector's 16 numbers is sent. Round 1: 3 and 2, so that [0, 2.5] and [1, 0] are left.
    # Round 2: of [3, 3.75] and [1.5, 2] the second ones. Round 3: of [4.5, 2.5] and [1.75, 2] 4.5 and 2.
    first, second, third = [-1.5, -1.0], [-1.5, -3.875], [-3.75, -4.875]
    strategy = SparseLoCo(every=1, keep=1 / 16, decay=0.5)
    for found in VirtualWorld(2).run(descend, strategy, 3):
        assert found == [first, second, third, third, [0.0]]


def test_within_a_round_the_mean_of_all_is_evaluated() -> None:
    strategy = SparseLoCo(every=2, outer_lr=0.5)
    for rank, found in enumerate(VirtualWorld(2).run(descend, strategy, 1)):
        assert found == [(-SLOPES[rank]).tolist(), (-SLOPES.mean(dim=0) / 2).tolist(), [0.0]]


def test_gaps_between_parameters_stay_zero() -> None:
    for found in VirtualWorld(2).run(descend, SparseLoCo(every=1, keep=1.0), 3):
        assert found[-1] == [0.0]
