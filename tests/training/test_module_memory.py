"""What modules know besides parameters and buffers, and change, goes on."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.training.module_memory import ModuleMemory


class Knowing(nn.Module):
    """A module that remembers in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shape, self.table = nn.Linear(2, 2), (2, 2), torch.ones(3)
        self.calls, self.seen, self.mean = 0, [0.0], torch.zeros(2)
        self.last: Tensor | None = None
        self.random = torch.Generator().manual_seed(0)
        self.extra = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(torch.rand((), generator=self.random)))
        self.mean = 0.5 * self.mean + x.detach().mean(dim=0)
        self.table[1] += 1
        self.extra += 1.5
        self.last = self.layer(x)
        return self.last

    def get_extra_state(self) -> dict[str, Any]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state["extra"]

    def known(self) -> list[Any]:
        random = self.random.get_state().tolist()
        return [self.calls, self.seen, self.mean.tolist(), self.table.tolist(), self.extra, random]


class Freezing(nn.Module):
    """A module that writes to its tensors where autograd does not see it, and stops its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.seen = nn.BatchNorm1d(2), torch.zeros(1), torch.zeros(2).numpy()
        self.wave, self.view = torch.zeros(2, dtype=torch.complex64), torch.from_numpy(self.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data.add_(1)
        self.seen += 1
        self.wave = (self.wave + 1j).conj()
        if self.calls == 2:
            self.norm.eval()
            self.norm.bias.requires_grad_(False)
        found: Tensor = self.norm(x)
        return found


def test_modes_frozen_parameters_and_what_is_written_past_autograd_are_kept() -> None:
    module, again = Freezing(), Freezing()
    memory, other = (ModuleMemory(one, modes=True) for one in (module, again))
    assert memory.state()["attributes"] == {}
    for _ in range(3):
        module(torch.rand(4, 2))
    kept = deepcopy(memory.state())
    assert kept["attributes"].keys() == {"/calls", "/seen", "/view", "/wave", "norm/training"}
    other.load_state(kept)
    assert (again.calls.tolist(), again.seen.tolist(), again.norm.training) == ([3], [3, 3], False)
    assert torch.equal(again.wave, module.wave)
    assert (again.norm.weight.requires_grad, again.norm.bias.requires_grad) == (True, False)


def test_a_mode_that_others_set_is_left_alone() -> None:
    module = Freezing()
    memory = ModuleMemory(module)
    module.eval()
    assert memory.state()["attributes"] == {}


def test_what_has_changed_is_kept_and_nothing_else() -> None:
    module = Knowing()
    whole = nn.Sequential(module, nn.Dropout(0.2))
    memory = ModuleMemory(whole)
    generator_s = {"0/random"}  # Of its state nobody can tell at once whether it is what it was.
    assert memory.state()["attributes"].keys() == generator_s
    for _ in range(3):
        whole(torch.rand(4, 2)).sum().backward()
    kept = deepcopy(memory.state())
    changed = {"0/calls", "0/seen", "0/mean", "0/table", "0/extra"}
    assert kept["attributes"].keys() == changed | generator_s
    again = Knowing()
    ModuleMemory(nn.Sequential(again, nn.Dropout(0.1))).load_state(kept)
    assert again.known() == module.known()
    assert again.shape == (2, 2)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (random.Random, lambda one: one.gauss(0, 1)),
        (np.random.RandomState, lambda one: one.normal()),
        (np.random.default_rng, lambda one: one.normal()),
        (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda one: one.random()),
        (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda one: one.integers(1 << 40)),
        (lambda seed: np.random.Generator(np.random.SFC64(seed)), lambda one: one.random()),
    ],
)
def test_generators_of_random_numbers_go_on(make: Callable[[int], Any], draw: Callable[[Any], float]) -> None:
    modules = [nn.Identity(), nn.Identity()]
    for seed, module in enumerate(modules):
        module.random = make(seed)
    memories = [ModuleMemory(module) for module in modules]
    assert memories[0].state()["attributes"] == {}
    for _ in range(700):
        draw(modules[0].random)
    state = json.loads(json.dumps(memories[0].state()))  # as a checkpoint has it
    there = modules[1].random
    memories[1].load_state(state)
    assert modules[1].random is there
    assert [draw(modules[1].random) for _ in range(9)] == [draw(modules[0].random) for _ in range(9)]


def test_the_system_s_random_numbers_have_nothing_to_go_on_with() -> None:
    module = nn.Identity()
    module.random = random.SystemRandom()
    assert ModuleMemory(module).state()["attributes"] == {}


class Name(str):
    """A text of a class of its own."""


class Odd(nn.Module):
    """A module that remembers in odd ways, and some that cannot be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.seed = np.random.default_rng(1), np.random.SeedSequence(2)
        self.bits, self.late = np.random.PCG64(3), None
        self.other: Any = np.random.default_rng(4)
        self.many: list[Any] = []
        self.table, self.flag, self.first = np.ones(3), 1, True
        self.order = OrderedDict(a=1, b=2)
        self.own = Counting(5)
        self.constant, self.names, self.act = {Name("a")}, {Name("a")}, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "first"):
            del self.first
        self.late = self.late or random.Random(6)
        self.other = np.random.Generator(np.random.MT19937(7))
        self.many = self.many or [torch.Generator().manual_seed(8), np.random.RandomState(9)]
        self.table[1] += 1
        self.flag = True
        self.order.move_to_end("a")
        self.names.add(Name("b"))
        self.act = torch.sigmoid
        self.drawn()
        return x

    def drawn(self) -> list[Any]:
        assert self.late is not None
        seeds = [self.numpy.spawn(1)[0].random(), self.seed.spawn(1)[0].generate_state(1)[0]]
        late = [self.late.random(), float(torch.rand((), generator=self.many[0])), self.many[1].random()]
        return [*seeds, self.bits.random_raw(), *late, self.other.random(), self.own.counted()]


class Counting(random.Random):
    """A generator that counts."""

    calls = 0

    def counted(self) -> float:
        self.calls += 1
        return self.calls + self.random()


def test_what_is_odd_goes_on_or_is_named() -> None:
    modules = [Odd(), Odd()]
    memories = [ModuleMemory(module) for module in modules]
    assert memories[0].state()["lost"] == []
    modules[0](torch.ones(1))
    state = deepcopy(memories[0].state())
    assert state["gone"] == ["/first"]
    assert state["lost"] == ["'act' (builtin_function_or_method) of the model", "'names' (set) of the model"]
    memories[1].load_state(state)
    assert not hasattr(modules[1], "first")
    assert (modules[1].flag is True, list(modules[1].order), modules[1].table.tolist()) == (
        True,
        ["b", "a"],
        [1, 2, 1],
    )
    assert [modules[1].drawn() for _ in range(3)] == [modules[0].drawn() for _ in range(3)]


class InASet(nn.Linear):
    """Has an extra state that no checkpoint can have."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: set[int] = set()

    def get_extra_state(self) -> set[int]:  # type: ignore[override]
        return self.seen

    def set_extra_state(self, state: set[int]) -> None:  # type: ignore[override]
        self.seen = state


def test_an_extra_state_that_no_checkpoint_can_have_is_copied_nevertheless() -> None:
    module = InASet()
    memory = ModuleMemory(module)
    module.seen.add(1)
    copied = memory.copied()
    module.seen.add(2)
    memory.load_state(copied)
    assert module.seen == {1}
    with pytest.raises(tutti.BadOption, match="the extra state of '' is of type set"):
        memory.state()


def test_what_only_other_ranks_have_changed_is_rank_0_s_again() -> None:
    def program(comm: Communicator) -> list[object]:
        module: Any = nn.Linear(2, 2)
        module.scale, module.table, module.gone = 1.0, torch.ones(2), 2
        memory = ModuleMemory(module, modes=True)
        if comm.rank:
            module.scale, module.late = -3.0, 5
            module.table.zero_()
            del module.gone
            module.bias.requires_grad_(False)
        memory.meet(comm)
        known = module.scale, module.table.tolist(), module.gone, hasattr(module, "late")
        return [*known, module.bias.requires_grad]

    for found in VirtualWorld(2).run(program):
        assert found == [1.0, [1, 1], 2, False, True]


def test_what_a_hook_writes_to_is_still_the_attribute_after_ranks_have_met() -> None:
    def program(comm: Communicator) -> tuple[bool, list[float], list[float]]:
        module: Any = nn.Linear(2, 2)
        module.mean, data = torch.zeros(2), torch.full((2,), float(comm.rank))
        module.last, hooked = torch.zeros(2), module.mean
        memory = ModuleMemory(module, modes=True)
        module.mean.fill_(5 + comm.rank)
        module.last = data
        memory.meet(comm)
        assert module.last.tolist() == [0, 0]
        return module.mean is hooked, hooked.tolist(), data.tolist()

    for rank, found in enumerate(VirtualWorld(2).run(program)):
        assert found == (True, [5, 5], [rank, rank])


def test_tensors_without_values_are_not_copied() -> None:
    module: Any = nn.Linear(2, 2)
    module.shape, module.scale = (torch.empty(3, device="meta"),), 1.0
    memory = ModuleMemory(module)
    first, known = memory.all_copied(), memory.copied()
    module.scale = 2.0
    memory.go_back(first, known)
    assert module.scale == 1.0
    assert module.shape[0].is_meta


def test_an_attribute_named_as_a_normalised_weight_is_kept() -> None:
    module: Any = nn.Linear(2, 2)
    module.scale, module.scale_v, module.scale_orig = 1.0, nn.Parameter(torch.ones(1)), nn.Parameter()
    memory = ModuleMemory(module)
    module.scale = 2.0
    assert memory.state()["attributes"] == {"/scale": 2.0}
