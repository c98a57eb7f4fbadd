"""The user's optimizer on a centre's weights, in a loop of the user's: on virtual ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.strategies.alone import Point, assert_close, sgd, start, wake_late
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.parameter_server.rules import OptimizerRule
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.strategies.base import Home
from tutti.strategies.placement import place

MOMENTUM = sgd(1.0, momentum=0.5)


class Loop:
    """A worker's model and optimizer, and its centre; all gradients are 1."""

    def __init__(self, comm: Communicator, make: Callable[[Point], Optimizer] = MOMENTUM) -> None:
        self.module = Point()
        self.optimizer = make(self.module)
        self.replica = place(self.module, comm, Home.PRIVATE)
        self.replica.in_own_loop = True
        self.rule = OptimizerRule(self.optimizer, self.replica, comm=comm)
        self.centre = SharedCentre(comm, self.replica.flats, self.rule, parts=2)

    def step(self) -> None:
        (flat,) = self.replica.flats
        self.centre.exchange([torch.ones_like(flat.grads)], [flat.weights])

    def moved(self) -> Tensor:
        self.centre.pull([self.replica.flats[0].weights])
        return self.module().detach() - start()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_loop_writes_into_the_state_counts_for_all(workers: int) -> None:
    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm)
        if comm.rank == 0:
            loop.step()
            for state in loop.optimizer.state.values():
                state["momentum_buffer"].fill_(8.0)
        comm.barrier()
        if comm.rank == comm.size - 1:
            loop.step()
        comm.barrier()
        return loop.moved()

    for found in VirtualWorld(workers).run(train):
        assert_close(found, torch.full_like(found, -1.0 - (0.5 * 8.0 + 1.0)))


def test_each_param_group_keeps_what_its_own_options_make_it_keep() -> None:
    def grouped(module: Point) -> Optimizer:
        groups = [{"params": [module.first]}, {"params": [module.second], "momentum": 0.5}]
        return optim.SGD(groups, lr=1.0)

    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm, grouped)
        comm.compute(float(comm.rank))
        loop.step()
        comm.barrier()
        return loop.moved()

    for found in VirtualWorld(2).run(train):
        assert_close(found, torch.tensor([-2.0] * 3 + [-2.5] * 2, dtype=torch.float64))


@pytest.mark.parametrize("late", [None, 0, 1])
def test_a_loaded_state_without_entries_ends_those_that_there_were(late: int | None) -> None:
    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm)
        fresh = deepcopy(loop.optimizer.state_dict())
        loop.step()
        comm.barrier()
        assert loop.optimizer.state_dict()["state"]
        loop.optimizer.load_state_dict(fresh)
        if comm.rank == late:
            wake_late(comm)
        loop.rule.adopt()
        assert not loop.optimizer.state_dict()["state"]
        comm.barrier()
        if comm.rank:
            loop.step()
        comm.barrier()
        return loop.moved()

    for found in VirtualWorld(2).run(train):
        assert_close(found, torch.full_like(found, -1.0 - 1.5 - 1.0))


@pytest.mark.parametrize(
    "value",
    [torch.zeros(7, dtype=torch.float64), torch.zeros(3), 8.0],
    ids=["another shape", "another dtype", "a number"],
)
def test_a_loaded_state_of_another_kind_is_refused(value: object) -> None:
    def train(comm: Communicator) -> None:
        loop = Loop(comm)
        first: nn.Parameter = loop.module.first
        loop.optimizer.state = defaultdict(dict, {first: {"momentum_buffer": value}})
        loop.rule.adopt()

    with pytest.raises(BadOption, match="momentum_buffer"):
        VirtualWorld(2).run(train)
