"""The attributes of somebody else's optimizers and modules from what `attributes` has made of them."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.object_state import RANDOM, kind_of, load_state_of, new_generator
from tutti.optim.attribute_memory import THINGS, Stretches, extent, live_bytes, place_in, thing_in
from tutti.state import Values

_DICTIONARIES: Final[dict[str, Any]] = {"/pairs": dict, "/OrderedDict": OrderedDict, "/Counter": Counter}
FACTORIES: Final[dict[str | None, Any]] = {
    None: None,
    **{one.__name__: one for one in (bool, int, float, str, list, dict, set, tuple)},
}


class AttributeReader:
    """Turns values into attributes again.

    What is there is changed in place, once: where it was found in several places, and no more is, the others
    get one of their own.

    Args:
        names: as the writer has them.
        own: memory that may be written to; tensors and arrays that lie elsewhere are replaced, but for
            parameters. None: any may.

    Attributes:
        own: likewise.
    """

    def __init__(self, names: Mapping[Any, str], own: Stretches | None = None) -> None:
        self.own = own
        self._named = {name: thing for thing, name in names.items()}
        tensors = [one for one in names if isinstance(one, Tensor)]
        self._model_s = Stretches(map(extent, tensors))
        self._devices = {one.device.type: one.device for one in tensors}
        self._taken = Stretches(())
        self._blocks: dict[int, Tensor] = {}
        self._written: dict[int, Any] = {}
        self._ones: dict[int, Any] = {}

    def set_attributes(self, owner: Any, values: Values) -> None:
        """Give an optimizer or another object its attributes."""
        for name, value in values.items():
            there = name in vars(owner)
            if there or not (isinstance(value, dict) and value.keys() & {"/same", "/lost"}):
                # A module would have others register what is hidden from it.
                vars(owner)[name] = self.value(value, vars(owner).get(name))

    def value(self, value: Any, now: Any) -> Any:
        """Return what a value stands for; what is there `now` is changed in place where that is possible."""
        if isinstance(value, Tensor):
            return self._tensor(value, now)
        if isinstance(value, list):
            return self._filled(self._items(value, now), now)
        if not isinstance(value, dict):
            return value
        (mark, inner) = next(iter(value.items())) if len(value) == 1 else ("", None)
        if not mark.startswith("/"):
            return self._mapping(value.items(), now)
        return self._marked(mark, inner, now)

    def _is_free(self, now: Any) -> bool:
        """Tell whether an object may be written to; that is once."""
        free = id(now) not in self._written
        self._written[id(now)] = now  # It stays, so that no other gets its identity.
        return free

    def _items(self, values: list[Any], now: Any) -> list[Any]:
        there = list(now) if isinstance(now, list | tuple | deque) else []
        there += [None] * len(values)
        return [self.value(item, one) for item, one in zip(values, there, strict=False)]

    def _filled(self, made: Any, now: Any) -> Any:
        """Return a list, a set or a dictionary: what is there now with this in it, if it is of the kind."""
        if not isinstance(now, type(made)) or not self._is_free(now):
            return made
        if isinstance(now, list):
            now[:] = made
        else:
            now.clear()
            now.update(made)
        return now

    def _mapping(self, pairs: Iterable[Any], now: Any, kind: Callable[[Any], Any] = dict) -> Any:
        there = now if isinstance(now, dict) else {}
        read = [(self.value(key, None), item) for key, item in pairs]
        return self._filled(kind({key: self.value(item, there.get(key)) for key, item in read}), now)

    def _tensor(self, value: Tensor, now: Any) -> Tensor:
        if not isinstance(now, Tensor) or now.layout is not torch.strided:
            return value.clone()
        if (now.shape, now.dtype) != (value.shape, value.dtype) or not self._is_free(now):
            return value.to(now.device, copy=True)
        if torch._debug_has_internal_overlap(now) == 1:  # It is expanded.
            return value.to(now.device, copy=True)
        return now.copy_(value) if self._takes(value, now) else value.to(now.device, copy=True)

    def _takes(self, value: Tensor, now: Tensor) -> bool:
        """Tell whether these values may be written to a tensor, which then has them."""
        if not (self.own is None or isinstance(now, nn.Parameter) or self.own.around(now)):
            return False
        if self._model_s.around(now):  # No more, or it would have no values.
            return False
        if self._taken.around(now) and not torch.equal(now, value.to(now.device)):
            return False
        self._taken.add(extent(now))
        return True

    def _view(self, inner: list[Any], now: Any) -> Any:
        number, memory, place = inner
        if memory is not None:
            self._blocks[number] = self._block(memory, place, now)
        block = self._blocks.get(number)
        if block is None or place_in(now, block.data_ptr()) == place:
            return now
        return thing_in(block, place)

    def _block(self, memory: Tensor, place: Values, now: Any) -> Tensor:
        """Return a block of memory again: that of what is there now, if this is all of the block."""
        begin, end = extent(now) if isinstance(now, THINGS) else (0, 0)
        if end - begin == len(memory) and place_in(now, begin) == place and self._is_free(now):
            there = live_bytes([now], (begin, end))
            if there is not None and self._takes(memory, there):
                return there.copy_(memory)
        kind = place["kind"]
        device = now.device if isinstance(now, Tensor) else self._devices.get(kind, torch.device("cpu"))
        return memory.to(device, copy=True)

    def _marked(self, mark: str, inner: Any, now: Any) -> Any:
        if mark in ("/parameter", "/module"):
            return self._named.get(inner, now)
        if mark == "/one":
            self._ones[inner[0]] = self.value(inner[1], now)
            return self._ones[inner[0]]
        if mark == "/as":
            return self._ones.get(inner, now)
        if mark == "/view":
            return self._view(inner, now)
        if mark == "/leaf":
            return self._leaf(inner, now)
        if mark in ("/hidden", "/optimizer"):
            return self._hidden(inner, now) if mark == "/hidden" else self._optimizer(inner, now)
        if mark == "/array":
            return self._array(inner, now)
        if mark == "/random":
            return self._generator(inner, now)
        if mark == "/object" and now is not None:
            now = now if self._is_free(now) else deepcopy(now)
            load_state_of(now, inner)
        if mark in ("/enum", "/number", "/dtype", "/device"):
            return _constant(mark, inner, now)
        return self._container(mark, inner, now)

    def _container(self, mark: str, inner: Any, now: Any) -> Any:
        if mark in _DICTIONARIES:
            return self._mapping(inner, now, _DICTIONARIES[mark])
        if mark == "/defaultdict":
            return self._with_default(inner[0], inner[1], now)
        if mark == "/mapping":
            return self._mapping(inner[1], now)
        if mark == "/list":
            return self._filled(self._items(inner[1], now), now)
        if mark in ("/tuple", "/size"):
            return (tuple if mark == "/tuple" else torch.Size)(self._items(inner, now))
        if mark == "/named":
            items, kind = self._items(inner[1], now), _class_of(inner[0], now)
            return kind._make(items) if hasattr(kind, "_make") else tuple(items)
        if mark in ("/set", "/frozenset"):
            items = self._items(inner, None)
            return self._filled(set(items), now) if mark == "/set" else frozenset(items)
        if mark == "/deque":
            return deque(self._items(inner, now), now.maxlen if isinstance(now, deque) else None)
        if mark == "/bounded":
            return deque(self._items(inner[1], now), inner[0])
        return now

    def _with_default(self, factory: Any, pairs: list[Any], now: Any) -> Any:
        there = getattr(now, "default_factory", None)
        found = self._mapping(pairs, now, lambda read: defaultdict(there, read))
        found.default_factory = FACTORIES.get(factory) if isinstance(factory, str | None) else there
        return found

    def _leaf(self, inner: list[Any], now: Any) -> Any:
        kind, needed, value, gradient = inner
        found = self.value(value, now)
        if kind == "Parameter" and not isinstance(found, nn.Parameter):
            found = nn.Parameter(found, requires_grad=False)
        found.requires_grad_(needed)
        gradient = self.value(gradient, None)
        found.grad = gradient.to(found.device) if isinstance(gradient, Tensor) else None
        return found

    def _hidden(self, inner: list[Any], now: Any) -> Any:
        _, tensors, attributes = inner
        if not isinstance(now, nn.Module):
            return now
        modules = dict(now.named_modules())
        for name, value in tensors.items():
            owner, _, leaf = name.rpartition(".")
            if owner in modules:
                setattr(modules[owner], leaf, self.value(value, getattr(modules[owner], leaf, None)))
        for path, value in attributes.items():
            name, _, attribute = path.rpartition("/")
            if name in modules:
                self.set_attributes(modules[name], {attribute: value})
        return now

    def _optimizer(self, inner: Values, now: Any) -> Any:
        if not isinstance(now, Optimizer):
            return now
        for key, kept in inner["state"]:
            now.state[self.value(key, None)] = self.value(kept, None)
        for group, options in zip(now.param_groups, inner["options"], strict=False):
            group |= {name: self.value(item, group.get(name)) for name, item in options.items()}
        self.set_attributes(now, inner["attributes"])
        return now

    def _array(self, value: Tensor, now: Any) -> Any:
        found = value.numpy()
        fits = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (found.shape, found.dtype)
        if not fits or not now.flags.writeable:
            return found.copy()
        try:
            return now if self._tensor(value, there := torch.from_numpy(now)) is there else found.copy()
        except (TypeError, ValueError):  # with other strides than tensors have
            return found.copy()

    def _generator(self, values: Values, now: Any) -> Any:
        kind = values["kind"]
        if not isinstance(now, RANDOM) or kind_of(now) != kind or _bits(now) != _bits_in(values["of"]):
            return now if kind is None else new_generator(kind, values["of"])
        if not self._is_free(now):
            now = deepcopy(now)
        try:
            load_state_of(now, values["of"])
        except BadOption:
            return new_generator(kind, values["of"])
        self.set_attributes(now, values["attributes"])
        return now


def _bits(generator: Any) -> str | None:
    """Return the name of the bit generator of one of NumPy's."""
    bits = getattr(generator, "bit_generator", generator)
    return type(bits).__name__ if isinstance(bits, np.random.BitGenerator) else None


def _bits_in(values: Any) -> str | None:
    """Return the same of one whose state this is."""
    found = json.loads(values) if isinstance(values, str) else None
    bits: str | None = found["bits"]["bit_generator"] if isinstance(found, dict) and "bits" in found else None
    return bits


def _constant(mark: str, inner: Any, now: Any) -> Any:
    if mark == "/dtype":
        return getattr(torch, inner)
    if mark == "/device":
        return torch.device(inner)
    if mark == "/number":
        return np.dtype(inner[0]).type(inner[1])
    kind = _class_of(inner[0], now)
    if not issubclass(kind, Enum):
        return now
    return kind[inner[1]] if inner[1] in kind.__members__ else kind(inner[1])


def _class_of(name: Any, now: Any) -> Any:
    """Return the class of this name; if it has none, or is not found, that of what is there now."""
    found = class_at(name) if isinstance(name, str) else None
    return found if isinstance(found, type) else type(now)


def class_at(name: str) -> Any:
    """Return what has this name, if its module is imported already."""
    module, _, names = name.partition(":")
    found: Any = sys.modules.get(module)
    for one in names.split("."):
        found = getattr(found, one, None)
    return found
