"""A state that is made when it is looked at knows what its reader has changed."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from tutti.own_loop.whole_state import WholeState


class Made:
    """A state of two keys, that counts how often it is made."""

    def __init__(self) -> None:
        self.times = 0
        self.state = WholeState(self.make)

    def make(self) -> dict[str, dict[str, object]]:
        self.times += 1
        return {"a": {"step": torch.tensor(1.0), "lr": 3}, "b": {"step": torch.tensor(float(self.times))}}


LOOKS: dict[str, Callable[[WholeState], object]] = {
    "getitem": lambda state: state["a"],
    "setitem": lambda state: state.__setitem__("c", {}),
    "delitem": lambda state: state.__delitem__("a"),
    "contains": lambda state: "a" in state,
    "iter": lambda state: list(iter(state)),
    "len": lambda state: len(state),
    "get": lambda state: state.get("a"),
    "pop": lambda state: state.pop("a"),
    "keys": lambda state: list(state.keys()),
    "values": lambda state: len(list(state.values())),
    "items": lambda state: len(list(state.items())),
    "reduce": lambda state: state.__reduce__()[0],
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_finds_what_is_made(name: str) -> None:
    made = Made()
    plain = defaultdict(dict, made.make())
    found = LOOKS[name](made.state)
    wanted = LOOKS[name](plain) if name != "reduce" else defaultdict
    assert made.times == 2
    if name in ("getitem", "get", "pop"):
        assert found == {"step": torch.tensor(1.0), "lr": 3}
    else:
        assert found == wanted
    assert list(made.state.keys()) == list(plain.keys())


def test_it_is_made_once_until_it_is_to_be_forgotten() -> None:
    made = Made()
    made.state.forget()
    assert made.times == 0
    assert made.state["b"]["step"] == 1
    assert made.state["b"]["step"] == 1
    made.state.forget()
    assert made.state["b"]["step"] == 2
    assert not made.state.changed()
    assert made.times == 2


CHANGES: dict[str, Callable[[WholeState], object]] = {
    "in place": lambda state: state["a"]["step"].add_(1),
    "another tensor": lambda state: state["a"].update(step=state["a"]["step"].clone()),
    "another number": lambda state: state["a"].update(lr=4),
    "one entry more": lambda state: state["a"].update(momentum=torch.zeros(1)),
    "one entry less": lambda state: state["b"].pop("step"),
    "another entry": lambda state: state["b"].update(momentum=state["b"].pop("step")),
    "one key less": lambda state: state.pop("b"),
    "another key": lambda state: state.__setitem__("c", state.pop("b")),
    "nothing left": lambda state: state.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    state = Made().state
    assert not state.changed()
    assert state["a"]["lr"] == 3
    assert not state.changed()
    CHANGES[name](state)
    assert state.changed()
    state.forget()
    assert not state.changed()


@pytest.mark.parametrize("of", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_is_a_plain_dict_of_what_is_there(of: Callable[[object], dict]) -> None:
    found = of(Made().state)
    assert type(found) is defaultdict
    assert found == {"a": {"step": torch.tensor(1.0), "lr": 3}, "b": {"step": torch.tensor(1.0)}}
    assert found["c"] == {}
