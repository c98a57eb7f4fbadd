"""The user's optimizer on a centre's weights, in a loop of the user's: on virtual ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.own_loop.custom import Counting
from tests.parameter_server.test_optimizer_state import LR, Summing
from tests.strategies.alone import Point, assert_close, sgd, start, wake_late
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.parameter_server.rules import OptimizerRule, Rounds
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.strategies.base import Home
from tutti.strategies.placement import place

MOMENTUM = sgd(1.0, momentum=0.5)


class Loop:
    """A worker's model and optimizer, and its centre; all gradients are 1."""

    def __init__(
        self, comm: Communicator, make: Callable[[Point], Optimizer] = MOMENTUM, rounds: bool = False
    ) -> None:
        self.module = Point()
        self.optimizer = make(self.module)
        self.replica = place(self.module, comm, Home.PRIVATE)
        self.replica.in_own_loop = True
        self.rule = (
            Rounds(self.optimizer, self.replica, comm.size, comm=comm)
            if rounds
            else OptimizerRule(self.optimizer, self.replica, comm=comm)
        )
        self.centre = SharedCentre(comm, self.replica.flats, self.rule, parts=2)

    def step(self) -> None:
        (flat,) = self.replica.flats
        self.centre.exchange([torch.ones_like(flat.grads)], [flat.weights])

    def change(self) -> None:
        """Write into the state, as a loop may do in plain torch."""
        for state in self.optimizer.state.values():
            state["momentum_buffer"].fill_(8.0)

    @property
    def moved(self) -> Tensor:
        return self.module().detach() - start()


def test_a_single_workers_loop_may_change_the_state() -> None:
    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm)
        loop.step()
        loop.change()
        loop.step()
        return loop.moved

    (found,) = VirtualWorld(1).run(train)
    assert_close(found, torch.full_like(found, -1.0 - (0.5 * 8.0 + 1.0)))


def test_a_change_is_refused_also_where_another_worker_makes_the_step() -> None:
    """The first worker's gradient waits for the second's."""

    def train(comm: Communicator) -> float:
        loop = Loop(comm, rounds=True)
        loop.step()
        loop.rule.round = 1
        comm.barrier()
        comm.compute(float(comm.rank))
        if comm.rank:
            loop.step()
        else:
            loop.change()
            with pytest.raises(BadOption, match="load_state_dict"):
                loop.step()
        return comm.clock()

    first, _ = VirtualWorld(2).run(train)
    assert first == pytest.approx(1.0, abs=0.01)


def counting(module: Point) -> Optimizer:
    return Counting(module.parameters(), lr=1.0)


def test_a_state_dict_has_what_others_have_counted() -> None:
    def train(comm: Communicator) -> int:
        loop = Loop(comm, counting)
        if comm.rank:
            loop.step()
            loop.step()
        comm.barrier()
        return loop.optimizer.state_dict()["param_groups"][0]["k"]

    assert VirtualWorld(2).run(train) == [2, 2]


def test_reading_a_state_dict_does_not_undo_a_change_unnoticed() -> None:
    def train(comm: Communicator) -> None:
        loop = Loop(comm, counting)
        loop.step()
        comm.barrier()
        loop.optimizer.param_groups[0]["k"] = 7
        assert loop.optimizer.state_dict()["param_groups"][0]["k"] == 7
        with pytest.raises(BadOption, match="load_state_dict"):
            loop.step()

    VirtualWorld(2).run(train)


def test_tensors_that_a_param_group_counts_in_may_stay_as_they_are() -> None:
    """Each of the two parameters adds one to the sum that its step is divided by."""

    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm, lambda module: Summing(module.parameters()))
        comm.compute(float(comm.rank))
        loop.step()
        loop.step()
        comm.barrier()
        loop.centre.pull([loop.replica.flats[0].weights])
        return loop.moved

    moves = [-LR * sum(1 / (2 * step + one) for step in range(4)) for one in (1, 2)]
    for found in VirtualWorld(2).run(train):
        assert_close(found, torch.tensor([moves[0]] * 3 + [moves[1]] * 2, dtype=torch.float64))


def test_each_param_group_keeps_what_its_own_options_make_it_keep() -> None:
    def grouped(module: Point) -> Optimizer:
        groups = [{"params": [module.first]}, {"params": [module.second], "momentum": 0.5}]
        return optim.SGD(groups, lr=1.0)

    def train(comm: Communicator) -> Tensor:
        loop = Loop(comm, grouped)
        comm.compute(float(comm.rank))
        loop.step()
        comm.barrier()
        loop.centre.pull([loop.replica.flats[0].weights])
        return loop.moved

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
        loop.centre.pull([loop.replica.flats[0].weights])
        return loop.moved

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
        with pytest.raises(BadOption, match="SGD keeps other things"):
            loop.rule.adopt()

    VirtualWorld(2).run(train)


def test_an_optimizer_that_cannot_step_a_parameter_of_no_group_is_refused() -> None:
    class Both(Point):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(2, dtype=torch.float64))

    def refuse(comm: Communicator) -> str:
        module = Both()
        optimizer = optim.Muon([module.matrix], lr=LR)
        replica = place(module, comm, Home.PRIVATE)
        replica.in_own_loop = True
        with pytest.raises(BadOption) as refused:
            SharedCentre(comm, replica.flats, OptimizerRule(optimizer, replica, comm=comm), parts=2)
        return str(refused.value)

    for message in VirtualWorld(2).run(refuse):
        assert "Muon has parameters of the model in no param group" in message
        assert "requires_grad_(False)" in message
