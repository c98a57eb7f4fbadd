"""An optimizer's state by parameter: left by some ranks, taken up by another number of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.optim.odd import Odd
from tests.optim.test_sparse import Words, move_rows
from tests.states import saved_by
from tutti.errors import BadCheckpoint
from tutti.optim.named import OPTIMIZERS
from tutti.optim.sharded import UNUSABLE, ShardedOptimizer, own_slices
from tutti.optim.sliced_optimizer import is_elementwise
from tutti.optim.sparse import RowOptimizer, sparse_tables
from tutti.optim.state import load, options_of
from tutti.replica import Replica
from tutti.state import LocalState, Named, Saved, State, named

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

EVERY: dict[str, Make] = {
    **{name: cls for name, cls in OPTIMIZERS.items() if cls not in UNUSABLE},
    "sgd, momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adam, amsgrad": partial(optim.Adam, amsgrad=True),
    "adamw, foreach": partial(optim.AdamW, foreach=True),
    "adam, eps 0": partial(optim.Adam, eps=0.0),
    "adagrad, initial": partial(optim.Adagrad, initial_accumulator_value=0.1),
    "rmsprop, centred": partial(optim.RMSprop, centered=True, momentum=0.5),
    "odd": Odd,
}


class Mixed(nn.Module):
    """A model of two dtypes and two orders of memory, with tied, fixed and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters = nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)
        self.wide, self.tied = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.tied.weight = self.wide.weight
        self.fixed = nn.Linear(3, 3).double().requires_grad_(False)
        self.single = nn.Linear(7, 5)
        self.nothing = nn.Parameter(torch.zeros(0, 4))


class Many(nn.ParameterList):
    """Parameters whose last elements fill no register of a processor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.randn(21, dtype=torch.float64) for _ in range(60))


class Matrices(nn.Module):
    """A model for optimizers of matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 9, bias=False), nn.Linear(9, 4, bias=False)


MODELS = {"muon": Matrices, "sgd, momentum": Many}


def new_model(name: str) -> nn.Module:
    return MODELS.get(name, Mixed)()


def in_groups(module: nn.Module, make: Make) -> Optimizer:
    """Two param groups whose options differ; the fixed parameters are in one of them."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.05}, {"params": others, "lr": 0.02}]
    return make(groups if others else groups[:1])


def laid_out(
    module: nn.Module, make: Make, ranks: int, saved: Saved | None = None, options: list[Any] | None = None
) -> tuple[Optimizer, Replica, list[ShardedOptimizer]]:
    optimizer = in_groups(module, make)
    if saved is not None and options is not None:
        load(optimizer, {p: name for name, p in module.named_parameters()}, saved, options)
    replica = Replica(module)
    cut = [own_slices(flat, ranks, optimizer) for flat in replica.flats]
    shards = [ShardedOptimizer(optimizer, replica, [s[rank] for s in cut]) for rank in range(ranks)]
    return optimizer, replica, shards


def train(replica: Replica, shards: list[ShardedOptimizer], steps: range, gaps: bool) -> None:
    parameters = [p for flat in replica.flats for p in flat.parameters]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if not (gaps and step % 5 == 1 and number % 2):
                parameter.grad.copy_(gradient)
        for shard in shards:
            shard.step()
        replica.zero_grad()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("gaps", [False, True])
def test_other_ranks_resume_bit_equal(name: str, ranks: int, gaps: bool) -> None:
    make = EVERY[name]
    optimizer, replica, shards = laid_out(new_model(name), make, 2)
    train(replica, shards, range(5), gaps)
    states = [State(shard.state()) for shard in shards]
    options, weights = copy.deepcopy((options_of(optimizer), replica.module.state_dict()))
    (saved, *_) = saved_by(states, ranks)
    train(replica, shards, range(5, 9), gaps)
    before = copy.deepcopy(saved)
    # In another order of memory, too: what is kept belongs to parameters, not to places.
    for order in (torch.preserve_format, torch.contiguous_format):
        module = new_model(name).to(memory_format=order)
        module.load_state_dict(weights)
        resumed, other, others = laid_out(module, make, ranks, saved, options)
        train(other, others, range(5, 9), gaps)
        for parameter, same in zip(replica.module.parameters(), module.parameters(), strict=True):
            if order is torch.preserve_format or is_elementwise(resumed):
                assert torch.equal(parameter, same)
            else:  # sums over a parameter, in another order
                assert torch.allclose(parameter, same, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(saved.joint.tensors[key], kept) for key, kept in before.joint.tensors.items())


def test_a_missing_rank_is_noticed() -> None:
    _, replica, shards = laid_out(Mixed(), optim.Adam, 2)
    train(replica, shards, range(1), gaps=False)
    with pytest.raises(BadCheckpoint, match="is not whole: elements from number"):
        named([shards[0].state()])


def test_an_optimizer_with_other_param_groups_is_refused() -> None:
    module = Mixed()
    with pytest.raises(BadCheckpoint, match="the optimizer has 1 param groups, and 2 in the checkpoint"):
        load(optim.Adam(module.parameters()), {}, saved_of(LocalState()), [{}, {}])


def saved_of(joint: LocalState, alone: LocalState | None = None) -> Saved:
    return Saved(named([joint]), None if alone is None else named([alone]), {}, None)


def test_options_are_those_of_the_checkpoint_in_the_optimizer_s_own_form() -> None:
    module = Matrices()
    rate = torch.tensor(0.5, dtype=torch.float64)
    other = optim.Adam(module.parameters(), lr=rate, betas=(0.5, 0.6), weight_decay=0.1)
    (options,) = options_of(other)
    options["betas"] = [0.5, 0.6]  # as JSON has it
    own = torch.tensor(0.1, dtype=torch.float64)
    optimizer = optim.Adam(module.parameters(), lr=own)
    load(optimizer, {}, saved_of(LocalState()), [options])
    group = optimizer.param_groups[0]
    assert (group["lr"] is own, own.item()) == (True, 0.5)
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.1)


@pytest.mark.parametrize(
    ("make", "asked", "own"), [(optim.Adam, False, False), (optim.Adam, True, True), (Odd, False, True)]
)
def test_an_optimizer_that_is_stepped_itself_gets_its_own_tensors(make: Make, asked: bool, own: bool) -> None:
    module = Matrices()
    names = {parameter: name for name, parameter in module.named_parameters()}
    kept = Named({"optimizer/first.weight/exp_avg": torch.ones(9, 5)}, {})
    optimizer = make(module.parameters())
    load(optimizer, names, Saved(kept, None, {}, None), [{}], copy=asked)
    optimizer.state[module.first.weight]["exp_avg"].zero_()
    assert kept.tensors["optimizer/first.weight/exp_avg"].any() == own


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_rows_of_tables_resume(name: str) -> None:
    module = Words()
    names = {module.table.weight: "table.weight"}
    first, then = [[1, 4, 1], [4, 4]], [[0, 1], [4]]
    optimizer = getattr(optim, name)([module.table.weight], lr=0.1)
    rows = RowOptimizer(optimizer, sparse_tables(module))
    move_rows(rows, module, first)
    held, weights = copy.deepcopy((rows.state(names), module.state_dict()))
    move_rows(rows, module, then)
    resumed = Words()
    resumed.load_state_dict(weights)
    other = getattr(optim, name)([resumed.table.weight], lr=0.1)
    load(other, {resumed.table.weight: "table.weight"}, saved_of(held), options_of(optimizer))
    move_rows(RowOptimizer(other, sparse_tables(resumed)), resumed, then)
    assert torch.equal(module.table.weight, resumed.table.weight)


@pytest.mark.parametrize(("options", "counted_on"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_state_is_where_the_optimizer_wants_it(options: dict[str, bool], counted_on: str) -> None:
    module = Matrices().to("meta")
    kept = {"optimizer/first.weight/exp_avg": torch.ones(9, 5), "optimizer/first.weight/step": torch.ones(())}
    optimizer = optim.Adam(module.parameters(), **options)
    names = {parameter: name for name, parameter in module.named_parameters()}
    load(optimizer, names, Saved(Named(kept, {}), None, {}, None), [{}])
    state = optimizer.state[module.first.weight]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", counted_on)
