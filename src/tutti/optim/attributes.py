"""The attributes of somebody else's optimizers and modules, as values that a checkpoint can have, and back.

A dictionary with one of these keys alone stands for something else:

/parameter   a parameter of the model, by its name
/pairs       a dictionary with keys that are no texts
/tuple       a tuple
/deque       a deque
/optimizer   an optimizer inside of this one: its state, the options of its param groups, its attributes
/object      anything with state_dict() and load_state_dict()
/random      a generator of random numbers: its kind and state, and the attributes of a class of somebody's
/array       an array of NumPy
/same        what has nothing to remember, such as a function, or is kept elsewhere, such as the model
/lost        anything else, by its type
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    return _Writer(names).attributes(optimizer)


def set_attributes(optimizer: Optimizer, names: Mapping[nn.Parameter, str], values: Values) -> None:
    """Give an optimizer what `attributes_of` has returned of another one; what is lost begins anew."""
    reader = _Reader({name: parameter for parameter, name in names.items()})
    with torch.no_grad():
        reader.set_attributes(optimizer, values)


def attribute_as_values(value: object, names: Mapping[nn.Parameter, str]) -> Any:
    """Return an attribute of a module of the model, whose parameters have these names."""
    return _Writer(names).values(value)


def attribute_from_values(values: Any, now: Any, names: Mapping[nn.Parameter, str]) -> Any:
    """Return the attribute that `attribute_as_values` was given; what is there `now` is changed in place."""
    with torch.no_grad():
        return _Reader({name: parameter for parameter, name in names.items()}).value(values, now)


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


@dataclass
class _Writer:
    """Turns attributes into values.

    Attributes:
        names: of the parameters.
        known: objects that are written already, or elsewhere, by their identity.
    """

    names: Mapping[nn.Parameter, str]
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._memory = {_address(parameter) for parameter in self.names}

    def attributes(self, optimizer: Optimizer) -> Values:
        if is_parameterwise(optimizer):
            return {}
        self.note(optimizer)
        return {
            name: self.values(value) for name, value in vars(optimizer).items() if name not in _of_torch()
        }

    def note(self, optimizer: Optimizer) -> None:
        """Note what is written elsewhere."""
        groups = optimizer.param_groups
        self.known |= {id(one) for one in (optimizer, optimizer.state, groups, optimizer.defaults, *groups)}

    def values(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) in self.known:
            return {"/same": None}
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, list | tuple | deque):
            items = [self.values(item) for item in value]
            return items if isinstance(value, list) else {f"/{_kind(value)}": items}
        if isinstance(value, Mapping):
            pairs = [[self.values(key), self.values(item)] for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("/") for key in value):
                return dict(pairs)
            return {"/pairs": pairs}
        return self.thing(value)

    def tensor(self, value: Tensor) -> Any:
        if isinstance(value, nn.Parameter) and value in self.names:
            return {"/parameter": self.names[value]}
        if not value.is_leaf or value.layout is not torch.strided:
            return {"/lost": type(value).__name__}
        if value.numel() and _address(value) in self._memory:
            return {"/same": None}
        return value.detach()

    def thing(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            own = id(value.state) not in self.known
            self.note(value)
            pairs = value.state.items() if own else ()
            options = [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
            return {
                "/optimizer": {
                    "state": [[self.values(key), self.values(kept)] for key, kept in pairs],
                    "options": [self.values(group) for group in options],
                    "attributes": self.attributes(value),
                }
            }
        if _has_nothing_to_remember(value):
            return {"/same": None}
        if isinstance(value, nn.Module):
            known = all(parameter in self.names for parameter in value.parameters())
            return {"/same": None} if known else {"/lost": type(value).__name__}
        if isinstance(value, np.ndarray):
            return _array(value)
        if isinstance(value, RANDOM):
            inner = {name: self.values(one) for name, one in getattr(value, "__dict__", {}).items()}
            return {"/random": {"kind": kind_of(value), "of": state_of(value, ""), "attributes": inner}}
        if has_state_dict(value):
            try:
                return {"/object": state_of(value, type(value).__name__)}
            except BadOption:
                return {"/lost": type(value).__name__}
        return {"/lost": type(value).__name__}


@dataclass
class _Reader:
    """Turns values into attributes again.

    Attributes:
        parameters: of the model, by name.
    """

    parameters: Mapping[str, nn.Parameter]

    def set_attributes(self, optimizer: Optimizer, values: Values) -> None:
        for name, value in values.items():
            there = name in vars(optimizer)
            if there or not (isinstance(value, dict) and value.keys() & {"/same", "/lost"}):
                setattr(optimizer, name, self.value(value, vars(optimizer).get(name)))

    def value(self, value: Any, now: Any) -> Any:
        """Return what a value stands for; what is there `now` is changed in place where that is possible."""
        if isinstance(value, Tensor) or isinstance(now, Tensor):
            return self.tensor(value, now)
        if isinstance(value, list):
            items = self.items(value, now)
            if isinstance(now, list):
                now[:] = items
                return now
            return tuple(items) if isinstance(now, tuple) else items
        if not isinstance(value, dict):
            return value
        (mark, inner) = next(iter(value.items())) if len(value) == 1 else ("", None)
        if not mark.startswith("/"):
            return self.mapping(list(value.items()), now)
        return self.marked(mark, inner, now)

    def items(self, values: list[Any], now: Any) -> list[Any]:
        there = list(now) if isinstance(now, list | tuple | deque) else []
        there += [None] * len(values)
        return [self.value(item, one) for item, one in zip(values, there, strict=False)]

    def mapping(self, pairs: list[Any], now: Any) -> Any:
        there = now if isinstance(now, dict) else {}
        read = [(self.value(key, None), item) for key, item in pairs]
        found = {key: self.value(item, there.get(key)) for key, item in read}
        if isinstance(now, dict):
            now.clear()
            now.update(found)
            return now
        return found

    def tensor(self, value: Any, now: Any) -> Any:
        if isinstance(value, dict):
            return self.marked(*next(iter(value.items())), now)
        if not isinstance(value, Tensor):
            return now.copy_(torch.as_tensor(value)) if isinstance(value, bool | int | float) else value
        fits = isinstance(now, Tensor) and now.shape == value.shape and now.dtype == value.dtype
        return now.copy_(value) if fits else value.clone()

    def marked(self, mark: str, inner: Any, now: Any) -> Any:
        if mark == "/parameter":
            return self.parameters[inner]
        if mark == "/pairs":
            return self.mapping(inner, now)
        if mark == "/tuple":
            return tuple(self.items(inner, now))
        if mark == "/deque":
            return deque(self.items(inner, now), now.maxlen if isinstance(now, deque) else None)
        if mark == "/optimizer" and isinstance(now, Optimizer):
            for key, kept in inner["state"]:
                now.state[self.value(key, None)] = self.value(kept, None)
            for group, options in zip(now.param_groups, inner["options"], strict=False):
                group |= {name: self.value(item, group.get(name)) for name, item in options.items()}
            self.set_attributes(now, inner["attributes"])
        elif mark == "/array":
            return _in_array(inner, now)
        elif mark == "/random":
            return self.generator(inner, now)
        elif mark == "/object" and now is not None:
            load_state_of(now, inner)
        return now

    def generator(self, values: Values, now: Any) -> Any:
        kind = values["kind"]
        if not isinstance(now, RANDOM) or kind_of(now) != kind or _bits(now) != _bits_in(values["of"]):
            return now if kind is None else new_generator(kind, values["of"])
        try:
            load_state_of(now, values["of"])
        except BadOption:
            return new_generator(kind, values["of"])
        for name, value in values["attributes"].items():
            if not (isinstance(value, dict) and value.keys() & {"/same", "/lost"}):
                setattr(now, name, self.value(value, vars(now).get(name)))
        return now


def _array(value: np.ndarray[Any, Any]) -> Any:
    try:
        return {"/array": torch.from_numpy(value if value.flags.writeable else value.copy())}
    except (TypeError, ValueError):  # of texts or objects, or with other strides than tensors have
        return {"/lost": type(value).__name__}


def _in_array(value: Tensor, now: Any) -> Any:
    found = value.numpy()
    fits = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (found.shape, found.dtype)
    if fits and now.flags.writeable:
        now[...] = found
        return now
    return found.copy()


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


def _kind(value: object) -> str:
    return "tuple" if isinstance(value, tuple) else "deque"


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
