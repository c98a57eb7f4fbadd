"""The attributes of somebody else's optimizers and modules, as values that a checkpoint can have, and back.

A dictionary with one of these keys alone stands for something else:

/parameter   a parameter or a buffer of the model, by its name
/module      a module of the model, by its name
/hidden      a module that is none of the model's: its tensors and its attributes
/leaf        a tensor with a gradient, or that needs one, or a parameter that is none of the model's
/one         an object that is found in several places: its number, and its values
/as          the same object in another place, by this number
/pairs       a dictionary with keys that are no texts
/OrderedDict, /Counter, /defaultdict, /mapping
             a dictionary of another class; the last one can be filled only where there is one
/list        a list of a class of somebody's, likewise
/tuple       a tuple
/size        a torch.Size
/named       a named tuple: its class, and what is in it
/deque       a deque
/bounded     a deque that holds so many at most
/set         a set of numbers, texts and tuples of them
/frozenset   one that stays as it is
/enum        a member of an enumeration: its class, and its name
/number      a number of NumPy: its type, and the number
/dtype       a dtype of torch
/device      a device
/optimizer   an optimizer inside of this one: its state, the options of its param groups, its attributes
/object      anything with state_dict() and load_state_dict()
/random      a generator of random numbers: its kind and state, and the attributes of a class of somebody's
/array       an array of NumPy
/same        what has nothing to remember, such as a function, or is kept elsewhere, such as the model
/lost        anything else, by its type

A class is given by its module and its name, or is /same as that of what is there now.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.object_state import RANDOM, has_state_dict, kind_of, load_state_of, new_generator, state_of
from tutti.optim.parameterwise import is_parameterwise
from tutti.state import Values

_WITHOUT_STATE: Final = (
    *(type, ModuleType, BuiltinFunctionType, random.SystemRandom),
    *(torch.dtype, torch.device),
)

OF_MODULES: Final = frozenset(vars(nn.Module()))
"""Attributes that any module has."""

_CHANGING: Final = (list, deque, dict, set, Tensor, np.ndarray, *RANDOM)
"""What may change in two places at once."""

_DICTIONARIES: Final[dict[str, Any]] = {"/pairs": dict, "/OrderedDict": OrderedDict, "/Counter": Counter}
_FACTORIES: Final[dict[str | None, Any]] = {
    None: None,
    **{one.__name__: one for one in (bool, int, float, str, list, dict, set, tuple)},
}

_PLAIN: Final = (
    *("/parameter", "/module", "/tuple", "/size", "/named", "/frozenset"),
    *("/enum", "/number", "/dtype", "/device"),
)
"""What can be a key again, or in a set."""


@cache
def _of_torch() -> frozenset[str]:
    """Return the attributes that any optimizer has, or gets from schedulers, which wrap its `step`, and a
    `GradScaler`.

    Making the first optimizer of a process imports the compiler of torch, which takes a second.
    """
    later = {"_opt_called", "step", "grad_scale", "found_inf"}
    later |= {"_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"}
    return frozenset(vars(Optimizer([torch.zeros(())], {}))) | later


def attributes_of(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> Values:
    """Return what an optimizer knows besides its state and its param groups, by attribute.

    Args:
        optimizer: one that is not known to treat each parameter by itself; of others, nothing.
        names: of all parameters of the model.
    """
    return AttributeWriter(names).attributes(optimizer)


def set_attributes(optimizer: Optimizer, names: Mapping[nn.Parameter, str], values: Values) -> None:
    """Give an optimizer what `attributes_of` has returned of another one; what is lost begins anew."""
    with torch.no_grad():
        AttributeReader(names).set_attributes(optimizer, values)


def attribute_as_values(value: object, names: Mapping[nn.Parameter, str]) -> Any:
    """Return what an optimizer keeps, for a model whose parameters have these names."""
    return AttributeWriter(names).values(value)


def attribute_from_values(values: Any, now: Any, names: Mapping[nn.Parameter, str]) -> Any:
    """Return what `attribute_as_values` was given; what is there `now` is changed in place."""
    with torch.no_grad():
        return AttributeReader(names).value(values, now)


def lost_in(value: Any, path: str) -> Iterator[str]:
    """Yield what an attribute had that could not be kept: the way to it, and its type."""
    if isinstance(value, dict):
        if value.keys() == {"/lost"}:
            yield f"'{path}' ({value['/lost']})"
        elif value.keys() == {"/pairs"}:
            for _, item in value["/pairs"]:
                yield from lost_in(item, path)
        else:
            for key, item in value.items():
                inner = path if key.startswith("/") or key in ("attributes", "state") else f"{path}.{key}"
                yield from lost_in(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from lost_in(item, path)


class AttributeLeaf(dict[str, Any]):
    """What stands for a thing that is not written; nothing but the dictionary is kept of it.

    Attributes:
        of: the thing.
    """

    def __init__(self, mark: str, says: str | None, of: Any) -> None:
        super().__init__({mark: says})
        self.of = of

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    @property
    def identity(self) -> Hashable:
        """What tells the thing from others, as long as it is there."""
        return _identity(self.of)

    @property
    def says(self) -> str:
        """The name of a class, or of that of another thing."""
        return self.of.__name__ if isinstance(self.of, type) else type(self.of).__name__

    @property
    def counts(self) -> bool:
        """Whether another thing in its place is a change; of what is lost and cannot be called, it is not."""
        return self.keys() == {"/same"} or callable(self.of)


def leaves_in(values: Any, path: str) -> Iterator[tuple[str, AttributeLeaf]]:
    """Yield the things that are not written, and where they are."""
    if isinstance(values, AttributeLeaf):
        yield path, values
    elif isinstance(values, dict | list):
        items: Iterable[Any] = values.items() if isinstance(values, dict) else enumerate(values)
        for key, item in items:
            if isinstance(item, dict | list):
                yield from leaves_in(item, f"{path}/{key}")


@dataclass
class AttributeWriter:
    """Turns attributes into values.

    Attributes:
        names: of the parameters; of a model's own attributes, of its buffers and modules as well.
        elsewhere: modules that others keep; None: others keep all modules.
        known: objects that are written already, or elsewhere, by their identity.
    """

    names: Mapping[Any, str]
    elsewhere: Collection[nn.Module] | None = None
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._memory = {_address(one) for one in self.names if isinstance(one, Tensor)}
        self._times: Counter[int] = Counter()
        self._numbers: dict[int, int] = {}

    def attributes(self, optimizer: Optimizer) -> Values:
        """Return the attributes of an optimizer that is not known to treat each parameter by itself."""
        if is_parameterwise(optimizer):
            return {}
        self._note(optimizer)
        own = {name: value for name, value in vars(optimizer).items() if name not in _of_torch()}
        self.count(own.values())
        return {name: self.values(value) for name, value in own.items()}

    def _note(self, optimizer: Optimizer) -> None:
        """Note what is written elsewhere."""
        groups = optimizer.param_groups
        self.known |= {id(one) for one in (optimizer, optimizer.state, groups, optimizer.defaults, *groups)}

    def count(self, things: Iterable[Any]) -> None:
        """Count how often each object is found that may change, before any of them is written."""
        for thing in things:
            if isinstance(thing, _CHANGING) and id(thing) not in self.known:
                self._times[id(thing)] += 1
            if isinstance(thing, tuple) or self._times[id(thing)] == 1:
                if isinstance(thing, list | tuple | deque):
                    self.count(thing)
                elif isinstance(thing, dict):
                    self.count(thing.values())

    def values(self, value: Any) -> Any:
        """Return an attribute as values."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self.known:
            return self._same(value)
        if isinstance(value, Tensor | nn.Module) and value in self.names:
            return {"/parameter" if isinstance(value, Tensor) else "/module": self.names[value]}
        if self._times[id(value)] < 2:
            return self._once(value)
        if (number := self._numbers.get(id(value))) is not None:
            return {"/as": number}
        number = self._numbers[id(value)] = len(self._numbers)
        values = self._once(value)
        if isinstance(values, AttributeLeaf):
            del self._numbers[id(value)]
            return values
        return {"/one": [number, values]}

    def _once(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Enum):
            member = value.name if value.name in type(value).__members__ else self.values(value.value)
            return {"/enum": [self._type_of(value), member]}
        if isinstance(value, np.generic | torch.dtype | torch.device):
            return self._number(value)
        if isinstance(value, list | tuple | deque):
            return self._sequence(value)
        if isinstance(value, set | frozenset):
            items = sorted(map(self.values, value), key=repr)
            return {f"/{type(value).__name__}": items} if _is_plain(items) else self._lost(value)
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        return self._thing(value)

    def _same(self, value: Any) -> Any:
        return AttributeLeaf("/same", None, value)

    def _lost(self, value: Any) -> Any:
        return AttributeLeaf("/lost", type(value).__name__, value)

    def _type_of(self, value: Any) -> Any:
        """Return the class of a value; one that its name does not find is that of what is there."""
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if _class_at(name) is type(value):
            return name
        return self._lost(value) if self.elsewhere is None else self._same(type(value))

    def _number(self, value: Any) -> Any:
        if isinstance(value, torch.dtype | torch.device):
            return {f"/{type(value).__name__}": str(value).removeprefix("torch.")}
        item = value.item()
        if isinstance(value, np.bool_ | np.number) and isinstance(item, bool | int | float):
            return {"/number": [value.dtype.name, item]}
        return item if isinstance(item, str) else self._lost(value)

    def _sequence(self, value: Any) -> Any:
        plain = type(value) in (tuple, torch.Size)
        if isinstance(value, tuple) and not plain and not hasattr(value, "_make"):
            return self._lost(value)
        items = [self.values(item) for item in value]
        if isinstance(value, list):
            return items if type(value) is list else {"/list": [self._same(type(value)), items]}
        if isinstance(value, deque):
            return {"/deque": items} if value.maxlen is None else {"/bounded": [value.maxlen, items]}
        if plain:
            return {"/tuple" if type(value) is tuple else "/size": items}
        return {"/named": [self._type_of(value), items]}

    def _mapping(self, value: dict[Any, Any]) -> Any:
        keys = list(map(self.values, value))
        if not all(map(_is_plain, keys)):
            return self._lost(value)
        pairs = [[key, self.values(item)] for key, item in zip(keys, value.values(), strict=True)]
        if isinstance(value, defaultdict):
            made = value.default_factory
            known = made is None or made in _FACTORIES.values()
            factory = getattr(made, "__name__", None) if known else self.values(made)
            return {"/defaultdict": [factory, pairs]}
        if type(value) is not dict:
            mark = f"/{type(value).__name__}"
            known = type(value) in (OrderedDict, Counter)
            return {mark: pairs} if known else {"/mapping": [self._same(type(value)), pairs]}
        if all(isinstance(key, str) and not key.startswith("/") for key in value):
            return dict(pairs)
        return {"/pairs": pairs}

    def _tensor(self, value: Tensor) -> Any:
        if not value.is_leaf or value.layout is not torch.strided:
            return self._lost(value)
        if value.numel() and _address(value) in self._memory:
            return self._same(value)
        if isinstance(value, nn.Parameter) or value.requires_grad or value.grad is not None:
            kind = "Parameter" if isinstance(value, nn.Parameter) else "Tensor"
            return {"/leaf": [kind, value.requires_grad, value.detach(), self.values(value.grad)]}
        return value.detach()

    def _module(self, value: nn.Module) -> Any:
        """Return a module that the model does not know of, such as an average of one of its layers."""
        if self.elsewhere is None:
            known = all(parameter in self.names for parameter in value.parameters())
            return self._same(value) if known else self._lost(value)
        if value in self.elsewhere:
            return self._same(value)
        self.known.add(id(value))
        modules = {name: one for name, one in value.named_modules() if one not in self.names}
        if any(type(one).get_extra_state is not nn.Module.get_extra_state for one in modules.values()):
            return self._lost(value)
        attributes = {
            f"{name}/{attribute}": self.values(kept)
            for name, one in modules.items()
            for attribute, kept in vars(one).items()
            if attribute == "training" or attribute not in OF_MODULES
        }
        tensors = [*value.named_parameters(), *value.named_buffers()]
        return {
            "/hidden": [self._same(value), {name: self.values(one) for name, one in tensors}, attributes],
        }

    def _thing(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            own = id(value.state) not in self.known
            self._note(value)
            pairs = value.state.items() if own else ()
            state = [[self.values(key), self.values(kept)] for key, kept in pairs]
            if not all(_is_plain(key) for key, _ in state):
                return self._lost(value)
            options = [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
            return {
                "/optimizer": {
                    "state": state,
                    "options": [self.values(group) for group in options],
                    "attributes": self.attributes(value),
                }
            }
        if _has_nothing_to_remember(value):
            return self._same(value)
        if isinstance(value, np.ndarray):
            array = _array(value)
            return self._lost(value) if array is None else {"/array": array}
        if isinstance(value, RANDOM):
            inner = {name: self.values(one) for name, one in getattr(value, "__dict__", {}).items()}
            return {"/random": {"kind": kind_of(value), "of": state_of(value, ""), "attributes": inner}}
        if has_state_dict(value):
            try:
                return {"/object": state_of(value, type(value).__name__)}
            except BadOption:
                return self._lost(value)
        return self._lost(value)


class AttributeReader:
    """Turns values into attributes again.

    What is there is changed in place, once: where it was found in several places, and no more is, the others
    get one of their own.

    Args:
        names: as the writer has them.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        self._named = {name: thing for thing, name in names.items()}
        self._taken = [_extent(one) for one in names if isinstance(one, Tensor)]
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
        begin, end = _extent(now)
        if any(begin < other_s and other < end for other, other_s in self._taken):
            # It has what was written to another, or to the model, or is no more a part of it.
            return now if torch.equal(now, value.to(now.device)) else value.to(now.device, copy=True)
        self._taken.append((begin, end))
        return now.copy_(value)

    def _marked(self, mark: str, inner: Any, now: Any) -> Any:
        if mark in ("/parameter", "/module"):
            return self._named.get(inner, now)
        if mark == "/one":
            self._ones[inner[0]] = self.value(inner[1], now)
            return self._ones[inner[0]]
        if mark == "/as":
            return self._ones.get(inner, now)
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
        found.default_factory = _FACTORIES.get(factory) if isinstance(factory, str | None) else there
        return found

    def _leaf(self, inner: list[Any], now: Any) -> Tensor:
        kind, needed, value, gradient = inner
        found = self._tensor(value, now)
        if kind == "Parameter" and not isinstance(found, nn.Parameter):
            found = nn.Parameter(found, requires_grad=False)
        found.requires_grad_(needed)
        found.grad = gradient.to(found.device, copy=True) if isinstance(gradient, Tensor) else None
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


def _array(value: np.ndarray[Any, Any]) -> Tensor | None:
    try:
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    except (TypeError, ValueError):  # of texts or objects, or with other strides than tensors have
        return None


def _bits(generator: Any) -> str | None:
    """Return the name of the bit generator of one of NumPy's."""
    bits = getattr(generator, "bit_generator", generator)
    return type(bits).__name__ if isinstance(bits, np.random.BitGenerator) else None


def _bits_in(values: Any) -> str | None:
    """Return the same of one whose state this is."""
    found = json.loads(values) if isinstance(values, str) else None
    bits: str | None = found["bits"]["bit_generator"] if isinstance(found, dict) and "bits" in found else None
    return bits


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; a DTensor has none but its part's."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor lie in memory."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    if own.layout is not torch.strided or not own.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
    return own.data_ptr(), own.data_ptr() + (last + 1) * own.element_size()


def _is_plain(values: Any) -> bool:
    """Tell whether values are of what can be a key again, or in a set."""
    if isinstance(values, list):
        return all(map(_is_plain, values))
    if isinstance(values, dict):
        return all(mark in _PLAIN and _is_plain(inner) for mark, inner in values.items())
    return not isinstance(values, Tensor)


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
    found = _class_at(name) if isinstance(name, str) else None
    return found if isinstance(found, type) else type(now)


def _class_at(name: str) -> Any:
    module, _, names = name.partition(":")
    found: Any = sys.modules.get(module)
    for one in names.split("."):
        found = getattr(found, one, None)
    return found


def _identity(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _extent(value), value.shape, value.stride() if value.layout is torch.strided else None
    if isinstance(value, partial):
        return tuple(map(_identity, (value.func, *value.args, *value.keywords, *value.keywords.values())))
    if isinstance(value, MethodType):
        return id(value.__self__), value.__func__
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value.__code__
    return value if isinstance(value, bool | int | float | str) else id(value)


def _has_nothing_to_remember(value: Any) -> bool:
    if isinstance(value, _WITHOUT_STATE):
        return True
    if isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(map(_has_nothing_to_remember, parts))
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not vars(value)
    if isinstance(value, MethodType):
        return isinstance(value.__self__, Optimizer | nn.Module)
    return value is None or isinstance(value, bool | int | float | str)
