"""The memory of modules: what they know besides parameters and buffers, and change while they are trained.

class Annealed(nn.Module):
    def forward(self, x):
        self.calls += 1                                 a number, a tensor, a generator, ... of its own
        return self.layer(x) / (1 + self.calls)

    def get_extra_state(self): ...                      or what it gives itself
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import cloudpickle
from torch import Tensor, nn

from tutti.checksum import checksum
from tutti.object_state import as_values, from_values
from tutti.optim.attributes import attribute_as_values, attribute_from_values, lost_in
from tutti.state import Values

_OF_TORCH: Final = frozenset(vars(nn.Module()))
"""Attributes that any module has."""


class ModuleMemory:
    """The extra states of a model's modules, and those of their attributes that have changed.

    Attributes are numbers, texts, tensors, generators of random numbers, and lists and dictionaries of them.
    What cannot be told from what it was is kept, too.

    Args:
        module: the model, before it is trained.
        modes: nobody else says how it is trained: the mode of each module is kept as well, and which
            parameters need gradients.
    """

    def __init__(self, module: nn.Module, modes: bool = False) -> None:
        self._module = module
        self._of_torch = _OF_TORCH - {"training"} if modes else _OF_TORCH
        self._needed = {name: one.requires_grad for name, one in module.named_parameters() if modes}
        # The tensors themselves stay, so that no other gets their memory.
        self._before = dict(self._attributes())
        self._there = set(self._paths())
        self._lost: set[str] = set()
        self._looked = 0
        self._functions = {
            path: value
            for path, value, values in self._all()
            if callable(value) and not isinstance(value, nn.Module) and not _is_kept(values)
        }
        self._pickles = {
            path: _pickle(value) for path, value, values in self._all() if any(lost_in(values, path))
        }
        self._marks = {path: _mark(values) for path, values in self._before.items()}

    def state(self) -> Values:
        """Return what the modules know now; the tensors are live.

        Raises:
            BadOption: an extra state has something that no checkpoint can have.
        """
        found = list(self._all())
        self._note_lost(found)
        attributes = {path: values for path, _, values in found if _is_kept(values)}
        changed = {
            path: values
            for path, values in attributes.items()
            if path not in self._marks or _mark(values) != self._marks[path]
        }
        extra = {
            name: as_values(module.get_extra_state(), f"the extra state of '{name}'")
            for name, module in self._with_extra_state()
        }
        needed = {
            name: one.requires_grad
            for name, one in self._module.named_parameters()
            if one.requires_grad != self._needed.get(name, one.requires_grad)
        }
        gone = sorted(self._there - set(self._paths()))
        return {
            "attributes": changed,
            "extra": extra,
            "needed": needed,
            "gone": gone,
            "lost": sorted(self._lost),
        }

    def load_state(self, values: Values) -> None:
        """Have the modules know what others of the same names knew."""
        names, modules = self._names, dict(self._module.named_modules())
        for path, found in values["attributes"].items():
            name, _, attribute = path.rpartition("/")
            if name in modules:
                now = vars(modules[name]).get(attribute)
                setattr(modules[name], attribute, attribute_from_values(found, now, names))
        for path in values.get("gone", []):
            name, _, attribute = path.rpartition("/")
            if name in modules and attribute in vars(modules[name]):
                delattr(modules[name], attribute)
        parameters = dict(self._module.named_parameters())
        for name, needed in values.get("needed", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(needed)
        for name, module in self._with_extra_state():
            if name in values["extra"]:
                module.set_extra_state(from_values(values["extra"][name]))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for path, _, values in self._all():
            if _is_kept(values):
                yield path, values

    def _all(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the way to each attribute of the modules, what it is, and its values."""
        names = self._names
        for name, module in self._module.named_modules():
            for attribute, value in vars(module).items():
                if attribute not in self._of_torch:
                    yield f"{name}/{attribute}", value, attribute_as_values(value, names)

    def _note_lost(self, found: Iterable[tuple[str, Any, Any]]) -> None:
        """Note what cannot be kept and is not what it was; that takes time, and is done ever less often."""
        self._looked += 1
        if self._looked & (self._looked - 1):
            return
        for path, value, values in found:
            if type(value).__module__.split(".")[0] == "tutti":  # such as what draws a dropout layer's masks
                continue
            if path in self._functions and self._functions[path] != value and not _is_kept(values):
                self._lost.add(f"'{_shown(path)}' ({type(value).__name__}) of the model")
            for lost in lost_in(values, _shown(path)):
                if path not in self._pickles or _pickle(value) != self._pickles[path]:
                    self._lost.add(f"{lost} of the model")

    def _paths(self) -> Iterator[str]:
        """Yield the ways to all attributes of the modules, those that cannot be kept as well."""
        for name, module in self._module.named_modules():
            yield from (
                f"{name}/{attribute}" for attribute in vars(module) if attribute not in self._of_torch
            )

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module

    @property
    def _names(self) -> Mapping[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what belongs to an attribute alone, without the model that it may know."""

    def persistent_id(self, thing: Any) -> str | None:
        return type(thing).__name__ if isinstance(thing, nn.Module | nn.Parameter) else None


def _pickle(value: Any) -> bytes | None:
    """Return what tells whether a value is still what it was; None: nothing does."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except Exception:  # Whatever a class of somebody's raises.
        return None
    return hashlib.sha256(written.getbuffer()).digest()


def _shown(path: str) -> str:
    return path.lstrip("/").replace("/", ".")


def _is_kept(values: Any) -> bool:
    return not (isinstance(values, dict) and values.keys() & {"/same", "/lost"})


def _mark(values: Any) -> Any:
    """Return what tells whether values are still what they were."""
    if isinstance(values, Tensor):
        # The version does not count what is written by way of `.data` or NumPy.
        version = None if values.is_inference() else values._version
        plain = values.is_cpu and not values.is_quantized and type(values) is Tensor
        return (
            values.data_ptr(),
            version,
            values.shape,
            checksum(values.resolve_conj().resolve_neg()) if plain else None,
        )
    if isinstance(values, list):
        return [_mark(item) for item in values]
    if isinstance(values, dict):
        return [(key, _mark(item)) for key, item in values.items()]  # Their order may count.
    return type(values), values.hex() if isinstance(values, float) else values
