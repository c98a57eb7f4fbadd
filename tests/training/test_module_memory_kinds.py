"""Attributes of every kind go on as what they were, in as many objects as they were, or are named."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tutti.checkpoint.encoding import decode, encode
from tutti.records.json_lines import parse_json
from tutti.state import State, Values
from tutti.training.module_memory import ModuleMemory

Phase = enum.IntEnum("Phase", "COLD WARM")
Side = enum.Enum("Side", "LEFT RIGHT")
Hand = enum.Flag("Hand", "LEFT RIGHT")
Sums = namedtuple("Sums", "count total")


class Unfindable:
    """Has classes that nobody finds by their names."""

    Phase = enum.Enum("Step", "COLD WARM")
    Sums = namedtuple("Total", "count total")


class Options(dict[str, Any]):
    """A dictionary of a class of its own."""


class Net(nn.Module):
    """A module that is given attributes."""

    def __init__(self, begin: Callable[[Any], object]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
        begin(self)


def as_kept(state: Values) -> Values:
    """Return a state as a checkpoint has it."""
    encoded = encode(State(own=state), 0)
    return decode(parse_json(encoded.head), deepcopy(encoded.tensors)).own


def gone_on(begin: Callable[[Any], object], change: Callable[[Any], object]) -> tuple[Any, Any, list[str]]:
    """Return a module that was changed, one that goes on with what it knew, and what is lost."""
    one, other = Net(begin), Net(begin)
    memory, again = ModuleMemory(one), ModuleMemory(other)
    assert again.state()["lost"] == []
    change(one)
    state = as_kept(memory.state())
    other.load_state_dict(one.state_dict())
    again.load_state(state)
    return one, other, state["lost"]


def begin_alike(net: Any) -> None:
    net.list, net.zero = [torch.zeros(2)] * 3, torch.zeros(2)
    net.one.mean = net.two.mean = torch.zeros(2)
    net.previous = net.norm.running_mean
    net.random = net.other = torch.Generator().manual_seed(1)
    net.array = net.copied = np.zeros(2)
    net.names = net.more = ["a"]
    net.best = net.table = {"a": 1}
    net.wide = torch.zeros(1).expand(3)
    net.rows = list(torch.zeros(2, 2))


def change_alike(net: Any) -> None:
    net.list[1] = torch.ones(2)
    net.one.mean, net.two.mean = net.one.mean + 1, net.two.mean + 2
    net.previous, net.norm.running_mean[0] = torch.full((2,), 5.0), 7
    net.other = torch.Generator().manual_seed(9)
    net.copied = np.ones(2)
    net.more, net.table = ["a", "b"], {"a": 2}
    net.wide = net.wide + 1
    net.rows[1] += 1


def test_objects_that_were_one_and_are_several_go_on_apart() -> None:
    one, net, lost = gone_on(begin_alike, change_alike)
    assert lost == []
    assert [item.tolist() for item in net.list] == [[0, 0], [1, 1], [0, 0]]
    assert net.list[0] is net.list[2]
    assert (net.one.mean.tolist(), net.two.mean.tolist()) == ([1, 1], [2, 2])
    assert (net.previous.tolist(), net.norm.running_mean.tolist()) == ([5, 5], [7, 0])
    for name in ("random", "other"):
        assert torch.equal(getattr(net, name).get_state(), getattr(one, name).get_state())
    assert (net.array.tolist(), net.copied.tolist()) == ([0, 0], [1, 1])
    assert (net.names, net.more, net.best, net.table) == (["a"], ["a", "b"], {"a": 1}, {"a": 2})
    assert net.wide.tolist() == [1, 1, 1]
    assert [row.tolist() for row in net.rows] == [[0, 0], [1, 1]]
    assert net.rows[0].untyped_storage().data_ptr() == net.rows[1].untyped_storage().data_ptr()


def join(net: Any) -> None:
    net.last = net.mean = torch.ones(2)
    net.kept, net.list = [net.mean], net.names
    net.running = net.norm.running_var
    net.names.append("b")


def test_objects_that_have_become_one_stay_one() -> None:
    def begin(net: Any) -> None:
        net.last, net.mean, net.kept, net.names = torch.zeros(2), torch.zeros(2), [], ["a"]
        net.list, net.running = [], None

    _, net, _ = gone_on(begin, join)
    assert net.last is net.mean is net.kept[0]
    assert net.list is net.names == ["a", "b"]
    assert net.running is net.norm.running_var


def nothing(net: Any) -> None:
    net.it = None


def put(value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda net: setattr(net, "it", value())


@pytest.mark.parametrize(
    ("begin", "change"),
    [
        (nothing, put(lambda: deque([1, 2], maxlen=2))),
        (nothing, put(lambda: deque([1]))),
        (put(lambda: deque([1, 2], maxlen=2)), lambda net: net.it.append(3)),
        (put(lambda: Phase.COLD), put(lambda: Phase.WARM)),
        (put(lambda: Unfindable.Phase.COLD), put(lambda: Unfindable.Phase.WARM)),
        (nothing, put(lambda: [Side.LEFT, Hand.LEFT | Hand.RIGHT])),
        (put(dict), lambda net: net.it.update({Side.LEFT: 1, Side.RIGHT: [2]})),
        (nothing, put(lambda: Sums(1, 2.0))),
        (put(lambda: Unfindable.Sums(0, 0.0)), put(lambda: Unfindable.Sums(1, 2.0))),
        (nothing, put(lambda: Counter({1: 2, 0: 3}))),
        (nothing, put(lambda: OrderedDict(b=1, a=2))),
        (nothing, put(lambda: defaultdict(list, {1: [2]}))),
        (put(lambda: defaultdict(lambda: 5)), lambda net: net.it.update(a=3)),
        (put(lambda: Options(a=1)), lambda net: net.it.update(a=2)),
        (nothing, put(lambda: torch.Size([1, 2]))),
        (put(lambda: torch.zeros(())), put(lambda: 0.1)),
        (put(lambda: torch.zeros(2)), put(lambda: {"a": (1, [2]), "b": 2})),
        (put(lambda: (1, 2)), put(lambda: [1, 2, 3])),
        (put(lambda: np.float32(1)), put(lambda: np.float32(0.1))),
        (put(lambda: np.float64(1)), put(lambda: [np.float64(0.1), np.int16(3), np.bool_(True)])),
        (put(lambda: torch.float32), put(lambda: [torch.float64, torch.device("cpu", 0)])),
        (put(lambda: {1, 2}), lambda net: net.it.add(3)),
        (nothing, put(lambda: {"a", (1, "b"), None, frozenset({1})})),
    ],
)
def test_what_comes_back_is_what_was_kept(begin: Any, change: Any) -> None:
    one, net, lost = gone_on(begin, change)
    assert lost == []
    assert (type(net.it), net.it) == (type(one.it), one.it)
    if isinstance(net.it, list):
        assert list(map(type, net.it)) == list(map(type, one.it))
    for name in ("maxlen", "default_factory"):
        assert (getattr(net.it, name, 0) is None) == (getattr(one.it, name, 0) is None)
    if isinstance(net.it, deque):
        assert net.it.maxlen == one.it.maxlen
    if isinstance(net.it, defaultdict):
        assert net.it["new"] == one.it["new"]


def make_leaf(net: Any) -> None:
    net.it, net.hidden = torch.ones(2, requires_grad=True), [nn.Parameter(torch.ones(1))]
    (net.it * net.it).sum().backward()
    net.hidden[0].requires_grad_(False)


@pytest.mark.parametrize("before", [None, torch.zeros(2)])
def test_leaves_go_on_with_their_gradients(before: Tensor | None) -> None:
    _, net, _ = gone_on(put(lambda: deepcopy(before)), make_leaf)
    assert (net.it.tolist(), net.it.grad.tolist(), net.it.requires_grad) == ([1, 1], [2, 2], True)
    assert isinstance(net.hidden[0], nn.Parameter)
    assert not net.hidden[0].requires_grad


class Averaged(nn.Module):
    """An average of a layer, which counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = deepcopy(layer), nn.BatchNorm1d(2), 0


def begin_hidden(net: Any) -> None:
    net.hidden = [Averaged(net.one).requires_grad_(False)]
    vars(net)["teacher"] = Averaged(net.two)
    net.order, net.weights = [net.one, net.two], list(net.teacher.parameters())
    net.again = [net.teacher]


def change_hidden(net: Any) -> None:
    for one in (net.hidden[0], net.teacher):
        one.layer.weight.data += 1
        one.norm.running_mean += 2
        one.norm.eval()
        one.calls += 3
    net.order.reverse()


def test_modules_that_the_model_does_not_know_of_go_on() -> None:
    one, net, lost = gone_on(begin_hidden, change_hidden)
    assert lost == []
    for found, wanted in ((net.hidden[0], one.hidden[0]), (net.teacher, one.teacher)):
        assert torch.equal(found.layer.weight, wanted.layer.weight)
        assert found.norm.running_mean.tolist() == [2, 2]
        assert (found.norm.training, found.calls) == (False, 3)
    assert net.order == [net.two, net.one]
    assert net.weights[0] is net.teacher.layer.weight
    assert net.again == [net.teacher]
    assert net.state_dict().keys() == one.state_dict().keys() == Net(nothing).state_dict().keys()


def test_a_model_that_another_module_knows_goes_on_by_itself_alone() -> None:
    model = Net(nothing)
    memory = ModuleMemory(model)
    other = ModuleMemory(Net(lambda net: setattr(net, "models", [model])))
    model.one.weight.data += 1
    assert other.state()["attributes"] == {}
    assert other.state()["lost"] == memory.state()["lost"] == []


def test_attributes_of_parameters_and_buffers_go_on() -> None:
    def change(net: Any) -> None:
        net.one.weight.count, net.norm.running_mean.seen = 3, torch.ones(2)
        del net.two.weight.tag

    _, net, _ = gone_on(lambda net: setattr(net.two.weight, "tag", 1), change)
    assert net.one.weight.count == 3
    assert net.norm.running_mean.seen.tolist() == [1, 1]
    assert not hasattr(net.two.weight, "tag")


class Stateful:
    """An object with a state."""

    def __init__(self) -> None:
        self.state = 0

    def state_dict(self) -> Any:
        """Return it."""
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        """Take one."""
        self.state = state["state"]


def test_two_objects_with_a_state_that_were_one_go_on_apart() -> None:
    def begin(net: Any) -> None:
        net.it = net.other = Stateful()

    def change(net: Any) -> None:
        net.it, net.other = Stateful(), Stateful()
        net.it.state, net.other.state = 1, 2

    _, net, lost = gone_on(begin, change)
    assert (net.it.state, net.other.state, lost) == (1, 2, [])


def square(x: float) -> float:
    return x * x


@pytest.mark.parametrize(
    ("begin", "change", "named"),
    [
        (
            put(lambda: {"act": torch.tanh}),
            lambda net: net.it.update(act=torch.relu),
            "builtin_function_or_method",
        ),
        (put(lambda: [torch.tanh, 1, square]), lambda net: net.it.pop(0), "function"),
        (put(lambda: partial(square, 1)), put(lambda: partial(square, 2)), "partial"),
        (put(lambda: lambda x=1: x), put(lambda: lambda x=2: x), "function"),
        (nothing, put(lambda: square), "function"),
        (put(dict), lambda net: net.it.update({Unfindable.Phase.COLD: 1}), "dict"),
        (nothing, put(lambda: Unfindable.Phase.COLD), "Step"),
        (nothing, put(lambda: Unfindable.Sums(1, 2)), "Total"),
        (nothing, put(lambda: Options(a=1)), "Options"),
        (nothing, put(lambda: defaultdict(lambda: 0)), "function"),
        (put(lambda: [nn.Linear(1, 1)]), lambda net: net.it.append(nn.Linear(1, 1)), "Linear"),
        (nothing, put(lambda: {object()}), "set"),
        (nothing, put(lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))])), "SGD"),
        (nothing, put(lambda: [Stateful()]), "Stateful"),
    ],
)
def test_what_cannot_come_back_is_named(begin: Any, change: Any, named: str) -> None:
    _, _, lost = gone_on(begin, change)
    assert lost == [f"'it' ({named}) of the model"]


def test_what_is_made_alike_once_more_is_no_change() -> None:
    def begin(net: Any) -> None:
        net.act, net.part, net.method = (lambda x: x), partial(square, 1), net.one.forward
        net.half, net.array = net.one.weight.detach()[:1], net.norm.running_mean.numpy()
        net.append = net.names.append

    memory = ModuleMemory(net := Net(lambda net: (setattr(net, "names", []), begin(net))))
    begin(net)
    state = memory.state()
    assert (state["attributes"], state["lost"]) == ({}, [])


def test_a_late_change_of_what_cannot_be_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(99))
    monkeypatch.setattr("tutti.training.module_memory.perf_counter", lambda: 1000.0 ** next(times))
    net: Any = Net(put(lambda: {Side}))
    memory = ModuleMemory(net)
    for _ in range(5):
        assert memory.state()["lost"] == []
    net.it.add(Hand)
    assert memory.state()["lost"] == ["'it' (set) of the model"]


def test_views_of_one_tensor_stay_views_of_it() -> None:
    def begin(net: Any) -> None:
        net.table = torch.zeros(2, 2)
        net.row, net.array, net.mean = net.table[1], net.table.numpy(), net.norm.running_mean.numpy()

    _, net, _ = gone_on(begin, lambda net: net.table.add_(1))
    net.table += 1
    net.norm.running_mean += 1
    assert (net.row.tolist(), net.array.tolist(), net.mean.tolist()) == ([2, 2], [[2, 2], [2, 2]], [1, 1])


def test_what_earlier_checkpoints_have_comes_back_as_it_did() -> None:
    """They have all dictionaries alike, deques without their length, and leaves without their gradients."""

    def begin(net: Any) -> None:
        net.order, net.last = OrderedDict(a=1), deque([0], maxlen=2)
        net.leaf = torch.zeros(2, requires_grad=True)

    net: Any = Net(begin)
    attributes = {"/order": {"b": 2, "a": 1}, "/last": {"/deque": [1, 2]}, "/leaf": torch.ones(2)}
    ModuleMemory(net).load_state({"attributes": attributes, "extra": {}})
    assert net.order == OrderedDict(b=2, a=1)
    assert (net.last, net.last.maxlen) == (deque([1, 2]), 2)
    assert (net.leaf.tolist(), net.leaf.requires_grad) == ([1, 1], True)


def test_an_array_with_a_mask_is_named() -> None:
    def begin(net: Any) -> None:
        net.array = np.ma.zeros(2)

    def change(net: Any) -> None:
        net.array = np.ma.masked_array(np.ones(2), mask=[True, False])

    assert gone_on(begin, change)[2] == ["'array' (MaskedArray) of the model"]
    assert gone_on(begin, lambda net: None)[2] == []
