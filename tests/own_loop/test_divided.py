"""An optimizer whose step is divided over ranks does, on each of them, what it does alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.own_loop.divided_optimizer import DividedOptimizer
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place, visible_memory

LENGTHS = (40, 20, 3, 50)
ALL = range(len(LENGTHS))

Make = Callable[[Iterable], Optimizer]

ADAM = partial(optim.Adam, lr=0.01, eps=1e-3)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)

OPTIMIZERS: dict[str, Make] = {
    "adam": ADAM,
    "adam_without_fused": partial(optim.Adam, lr=0.01, eps=1e-3, fused=False),
    "adam_whose_rate_is_a_tensor": partial(optim.Adam, lr=torch.tensor(0.01, dtype=torch.float64), eps=1e-3),
    "amsgrad": partial(optim.Adam, lr=0.01, eps=1e-3, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": SGD,
    "dampened": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "fused_momentum": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.1, t0=1),
}


def vectors() -> nn.ParameterList:
    """Parameters with gaps behind them, as 16 elements make a cache line; one is transposed."""
    return nn.ParameterList(
        nn.Parameter(torch.linspace(-1, 1 + number, length, dtype=torch.float64))
        if number
        else nn.Parameter(torch.linspace(-1, 1, length, dtype=torch.float64).view(8, 5).t())
        for number, length in enumerate(LENGTHS)
    )


class Pair:
    """The same training by plain torch, and divided over the ranks.

    Args:
        comm: the ranks.
        make: makes the optimizer, of an iterable of parameters or of param groups.
        groups: how the parameters are grouped; what is in no group is not trained.
        apart: the optimizer's gradients are not where `backward()` leaves them.
        late: a rank that comes after the others to what they do together.
    """

    def __init__(
        self,
        comm: Communicator,
        make: Make = ADAM,
        groups: Sequence[Sequence[int]] = (ALL,),
        apart: bool = False,
        module: Callable[[], nn.Module] = vectors,
        late: int = -1,
    ) -> None:
        self.comm, self.late = comm, late
        self.plain, self.module = module(), module()
        memory, self.copies = visible_memory(comm)
        self.replica = place(self.module, comm, WeightPlacement.PRIVATE, memory, frozen=True)
        self.gradients = [
            torch.zeros_like(flat.grads) if apart else flat.grads for flat in self.replica.flats
        ]
        self.alone = make(self._groups(self.plain, groups))
        self.optimizer = make(self._groups(self.module, groups))
        self.native = self.optimizer.step
        self.divided = DividedOptimizer(self.optimizer, self.replica, self.copies, self.gradients, comm.node)
        self.turn = 0

    @staticmethod
    def _groups(module: nn.Module, groups: Sequence[Sequence[int]]) -> list[dict]:
        every = list(module.parameters())
        return [
            {"params": [every[number] for number in numbers], "lr": 0.01 / (1 + at)}
            if len(groups) > 1
            else {"params": [every[number] for number in numbers]}
            for at, numbers in enumerate(groups)
        ]

    def bring(self, present: Iterable[int] = ALL) -> None:
        """Give some parameters a gradient, and the others none."""
        self.turn += 1
        for module in (self.plain, self.module):
            for number, parameter in enumerate(module.parameters()):
                new = torch.sin(parameter.detach() * (3 + self.turn) + number) if number in present else None
                parameter.grad = new

    def step(self, present: Iterable[int] = ALL) -> None:
        """One update of both, as `optimizer.step()` is called."""
        self.bring(present)
        self.alone.step()
        self.step_divided()
        self.compare_weights()

    def step_divided(self) -> None:
        self.divided.bring_weights()
        changed = self.divided.changed()
        self.comm.barrier()
        if self.comm.rank == self.late:
            self.comm.compute(1.0)
        if changed:
            self.divided.adopt()
        self.divided.step()

    def compare_weights(self) -> None:
        for ours, theirs in zip(self.module.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)

    def compare_state(self) -> None:
        ours, theirs = self.optimizer.state_dict(), self.alone.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, entries in theirs["state"].items():
            kept = {name: value for name, value in entries.items() if value is not None}
            assert ours["state"][number].keys() == kept.keys()
            for name, value in kept.items():
                wanted = torch.as_tensor(value, dtype=torch.float64)
                found = torch.as_tensor(ours["state"][number][name], dtype=torch.float64)
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def on_ranks(program: Callable[[Communicator], object], *sizes: int) -> None:
    for size in sizes:
        VirtualWorld(size).run(program)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 7])
def test_weights_and_state_are_those_of_one_process(name: str, size: int) -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm, OPTIMIZERS[name])
        assert pair.divided.fits(pair.native)
        before = [parameter.detach().clone() for parameter in pair.module.parameters()]
        for _ in range(4):
            pair.step()
        pair.compare_state()
        assert not any(map(torch.equal, before, pair.module.parameters()))

    on_ranks(program, size)


@pytest.mark.parametrize(
    "name", ["adam", "adam_without_fused", "momentum", "dampened", "nadam", "asgd", "sgd"]
)
@pytest.mark.parametrize("late", [-1, 0, 1])
@pytest.mark.parametrize(
    "presents",
    [
        (ALL, ALL, (0, 2, 3), (1,), (1,), ALL, (0, 2, 3), (0, 1), ALL, (0, 1, 2), ALL),
        ((0, 1), (0, 1), ALL, ALL, (3,)),
    ],
    ids=["now and then", "first late"],
)
def test_parameters_without_a_gradient_stay_and_count_no_step(
    name: str, late: int, presents: Sequence[Sequence[int]]
) -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm, OPTIMIZERS[name], late=late)
        for present in presents:
            pair.step(present)
            pair.compare_state()

    on_ranks(program, 1, 2, 3)


@pytest.mark.parametrize("begins", ["new", "loaded"])
def test_parameters_that_are_unfrozen_later_and_the_others_keep_their_counts(begins: str) -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm)
        late = [list(module.parameters())[2] for module in (pair.plain, pair.module)]
        if begins == "loaded":
            pair.step()
            for optimizer in (pair.alone, pair.optimizer):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for parameter in late:
            parameter.requires_grad_(False)
        pair.step((0, 1, 3))
        pair.step((0, 1, 3))
        pair.compare_state()
        for parameter in late:
            parameter.requires_grad_(True)
        for present in (ALL, (1, 2), ALL):
            pair.step(present)
            pair.compare_state()

    on_ranks(program, 2, 3)


def test_options_that_change_on_the_way_may_bring_other_state() -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm, OPTIMIZERS["sgd"])
        for options in ({}, {"momentum": 0.9}, {"nesterov": True}, {"weight_decay": 0.1}, {"maximize": True}):
            for optimizer in (pair.alone, pair.optimizer):
                optimizer.param_groups[0].update(options)
            pair.step()
        pair.compare_state()

    on_ranks(program, 2)


def test_a_group_may_be_added() -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm, groups=((0, 1),))
        pair.step()
        for module, optimizer in ((pair.plain, pair.alone), (pair.module, pair.optimizer)):
            optimizer.add_param_group({"params": list(module.parameters())[2:], "lr": 0.5})
        for _ in range(2):
            pair.step()
        pair.compare_state()

    on_ranks(program, 2)


def test_weights_that_the_loop_has_put_in_the_place_of_ours_are_moved() -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm)
        pair.step()
        for module in (pair.plain, pair.module):
            first = next(module.parameters())
            first.data = first.detach() * 2
        pair.step()
        ours = next(pair.module.parameters())
        assert ours.data_ptr() == pair.copies[0][comm.node.rank].data_ptr()
        assert not torch.equal(ours, torch.zeros_like(ours))

    on_ranks(program, 2)


# The state


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", ["adam", "adagrad", "momentum", "nadam", "asgd"])
def test_a_loaded_state_is_gone_on_from(name: str, late: int) -> None:
    def program(comm: Communicator) -> None:
        pair = Pair(comm, OPTIMIZERS[name], late=late)
        pair.step()
        pair.step((0, 3))
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.alone, pair.optimizer)]
        pair.step()
        for optimizer, state in zip((pair.alone, pair.optimizer), saved, strict=True):
            optimizer.load_state_dict(state)
        assert pair.divided.changed()
        for present in (ALL, (1, 2), ALL):
            pair.step(present)
        pair.compare_state()

    on_ranks(program, 2)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))


def fits(change: Callable[[Optimizer], object], module: Callable[[], nn.Module] = vectors) -> bool:
    """Whether the optimizer may be divided after a change."""

    def program(comm: Communicator) -> bool:
        pair = Pair(comm, module=module, groups=(range(len(list(module().parameters()))),))
        change(pair.optimizer)
        return pair.divided.fits(pair.native)

    found = set(VirtualWorld(2).run(program))
    return found.pop() if len(found) == 1 else pytest.fail("the ranks differ")


def strange(tensor: Tensor) -> Callable[[Optimizer], object]:
    return lambda optimizer: optimizer.param_groups[0]["params"].append(nn.Parameter(tensor))


CHANGES: dict[str, Callable[[Optimizer], object]] = {
    "pre hook": lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "post hook": lambda optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "foreach": lambda optimizer: optimizer.param_groups[0].update(foreach=True),
    "differentiable": lambda optimizer: optimizer.param_groups[0].update(differentiable=True),
    "capturable": lambda optimizer: optimizer.param_groups[0].update(capturable=True),
    "a scaler that changes gradients in the step": lambda one: setattr(one, "grad_scale", torch.tensor(2.0)),
    "a division by nothing": lambda optimizer: optimizer.param_groups[0].update(eps=0),
    "a stranger": strange(torch.zeros(2, dtype=torch.float64)),
    "a parameter on another device": strange(torch.zeros(2, device="meta")),
}


def test_an_optimizer_is_divided_if_it_moves_each_number_by_itself_and_nothing_looks_on() -> None:
    assert fits(lambda optimizer: None)
    assert [name for name, change in CHANGES.items() if fits(change)] == []
    assert not fits(lambda optimizer: None, Table)  # the gradient of a table is one of rows
