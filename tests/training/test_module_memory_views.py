"""Attributes that are views of one another go on as such, or are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.test_module_memory_kinds import Net, gone_on, nothing
from tutti.training.module_memory import ModuleMemory

Change = Callable[[Any], object]


def begin_store(net: Any) -> None:
    net.row, net.store = None, torch.zeros(4, 3)


def begin_array(net: Any) -> None:
    net.row, net.store = None, np.zeros((4, 3))


def change(make: Callable[[Any], Any]) -> Change:
    """Have an attribute become a view, and write to what it is a view of."""

    def changed(net: Any) -> None:
        net.row = make(net.store)
        net.store[1] += 1

    return changed


def as_lists(net: Any) -> list[Any]:
    return [one.tolist() for one in (net.store, net.row)]


@pytest.mark.parametrize(
    ("begin", "make"),
    [
        (begin_store, lambda store: store[1]),
        (begin_store, lambda store: store[1, 2]),
        (begin_store, lambda store: store[:, ::2].t()),
        (begin_store, lambda store: store.view(torch.int16)[1:, 1:3]),
        (begin_store, lambda store: store.view(6, 2)),
        (begin_store, lambda store: store.view(-1, 1).expand(-1, 2)),
        (begin_store, lambda store: store.numpy()[1:]),
        (begin_array, lambda store: store[1]),
        (begin_array, lambda store: store[::-1, ::2]),
        (begin_array, lambda store: store.T),
        (begin_array, lambda store: store.view("S8")),
        (begin_array, lambda store: np.broadcast_to(store[1], (2, 3))),
        (begin_array, lambda store: np.lib.stride_tricks.sliding_window_view(store, 2, 1)),
        (begin_array, lambda store: torch.from_numpy(store[1])),
        (begin_array, lambda store: torch.from_numpy(store)[1].numpy()),
    ],
)
def test_what_has_become_a_view_is_one(begin: Change, make: Callable[[Any], Any]) -> None:
    one, net, lost = gone_on(begin, change(make))
    assert lost == []
    assert (type(net.store), type(net.row), net.row.dtype) == (type(one.store), type(one.row), one.row.dtype)
    for each in (one, net):
        each.store[1, 2] = 5
    assert as_lists(net) == as_lists(one)
    if isinstance(one.row, np.ndarray):
        assert net.row.flags.writeable == one.row.flags.writeable
        if not one.row.flags.writeable:
            return
    for each in (one, net):
        each.row[(0,) * each.row.ndim] = b"7" if each.row.dtype == "S8" else 7
    assert as_lists(net) == as_lists(one)


def test_parts_of_what_nobody_keeps_share_their_memory() -> None:
    def split(net: Any) -> None:
        table = torch.arange(6.0).view(3, 2)
        net.columns, net.kept = [table[:, 0], table[:, 1]], {"row": table[1], "last": table[2, 1:]}

    _, net, _ = gone_on(nothing, split)
    net.kept["row"] += 10
    net.kept["last"] += 20
    assert [column.tolist() for column in net.columns] == [[0, 12, 4], [1, 13, 25]]


def test_views_of_every_dtype_go_on() -> None:
    dtypes = (torch.complex128, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool)

    def join(net: Any) -> None:
        net.whole = [torch.ones(3).to(dtype) for dtype in dtypes]
        net.parts = [one[1:] for one in net.whole]

    _, net, _ = gone_on(nothing, join)
    for whole, part, dtype in zip(net.whole, net.parts, dtypes, strict=True):
        part.zero_()
        assert (whole.dtype, part.dtype, whole.to(torch.complex128).tolist()) == (dtype, dtype, [1, 0, 0])


def test_what_was_a_view_and_is_none_leaves_the_other_as_it_was() -> None:
    def begin(net: Any) -> None:
        net.table = torch.zeros(2, 2)
        net.row, net.array = net.table[1], net.table.numpy()

    def part(net: Any) -> None:
        net.row = net.row + 1
        net.array = net.array + 2

    _, net, _ = gone_on(begin, part)
    assert (net.table.tolist(), net.row.tolist()) == ([[0, 0], [0, 0]], [1, 1])
    assert net.array.tolist() == [[2, 2], [2, 2]]


def test_a_block_that_is_there_is_written_to_in_place() -> None:
    def begin(net: Any) -> None:
        net.table = torch.zeros(2, 2)
        net.row = net.table[1]

    other: Any = Net(begin)
    table, row = other.table, other.row
    one: Any = Net(begin)
    memory = ModuleMemory(one)
    one.row += 1
    ModuleMemory(other).load_state(memory.state())
    assert (other.table is table, other.row is row, table.tolist()) == (True, True, [[0, 0], [1, 1]])


def test_leaves_and_hidden_modules_share_memory_with_what_is_a_view_of_theirs() -> None:
    def begin(net: Any) -> None:
        net.hidden, net.weight = [nn.Linear(2, 2, bias=False)], None

    def join(net: Any) -> None:
        net.leaf = torch.ones(2, requires_grad=True)
        (net.leaf * 3).sum().backward()
        net.inside, net.gradient = net.leaf.detach(), net.leaf.grad
        net.weight = net.hidden[0].weight.detach()[0]

    _, net, lost = gone_on(begin, join)
    assert lost == []
    net.inside += 1
    net.weight.fill_(4)
    assert (net.leaf.tolist(), net.leaf.requires_grad, net.inside.requires_grad) == ([2, 2], True, False)
    assert net.leaf.grad is net.gradient
    assert net.gradient.tolist() == [3, 3]
    assert net.hidden[0].weight[0].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("begin", "make", "named"),
    [
        (begin_store, lambda net: net.one.weight.detach()[0], "Tensor"),
        (begin_store, lambda net: net.norm.running_mean.numpy()[1:], "ndarray"),
        (begin_store, lambda net: torch.from_numpy(net.norm.running_mean.numpy()[1:]), "Tensor"),
        (begin_store, lambda net: np.broadcast_to(net.norm.running_mean.numpy(), (2, 2)), "ndarray"),
        (begin_array, lambda net: net.store[0].view(np.recarray), "recarray"),
        (begin_array, lambda net: net.store.view([("a", "f8"), ("b", "f8"), ("c", "f8")]), "ndarray"),
    ],
)
def test_views_that_cannot_come_back_are_named(begin: Change, make: Callable[[Any], Any], named: str) -> None:
    def changed(net: Any) -> None:
        net.row = make(net)
        net.store[1] = 2

    _, net, lost = gone_on(begin, changed)
    assert (net.row, lost) == (None, [f"'row' ({named}) of the model"])
    assert net.store[1].tolist() == [2, 2, 2]


def test_views_of_what_nobody_can_write_to_are_as_good_as_copies() -> None:
    content = np.frombuffer(np.arange(4.0).tobytes())
    _, net, lost = gone_on(nothing, lambda net: setattr(net, "parts", [content, content[1:]]))
    assert ([part.tolist() for part in net.parts], lost) == ([[0, 1, 2, 3], [1, 2, 3]], [])
