"""The memory of modules: what they know besides parameters and buffers, and change while they are trained.

class Annealed(nn.Module):
    def forward(self, x):
        self.calls += 1                                 a number, a tensor, a generator, ... of its own
        return self.layer(x) / (1 + self.calls)

    def get_extra_state(self): ...                      or what it gives itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from tutti.checksum import checksum
from tutti.object_state import as_values, from_values
from tutti.optim.attributes import attribute_as_values, attribute_from_values
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
        self._marks = {path: _mark(values) for path, values in self._before.items()}

    def state(self) -> Values:
        """Return what the modules know now; the tensors are live.

        Raises:
            BadOption: an extra state has something that no checkpoint can have.
        """
        attributes = dict(self._attributes())
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
        return {"attributes": changed, "extra": extra, "needed": needed}

    def load_state(self, values: Values) -> None:
        """Have the modules know what others of the same names knew."""
        names, modules = self._names, dict(self._module.named_modules())
        for path, found in values["attributes"].items():
            name, _, attribute = path.rpartition("/")
            if name in modules:
                now = vars(modules[name]).get(attribute)
                setattr(modules[name], attribute, attribute_from_values(found, now, names))
        parameters = dict(self._module.named_parameters())
        for name, needed in values.get("needed", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(needed)
        for name, module in self._with_extra_state():
            if name in values["extra"]:
                module.set_extra_state(from_values(values["extra"][name]))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        names = self._names
        for name, module in self._module.named_modules():
            for attribute, value in vars(module).items():
                if attribute not in self._of_torch:
                    values = attribute_as_values(value, names)
                    if not (isinstance(values, dict) and values.keys() & {"/same", "/lost"}):
                        yield f"{name}/{attribute}", values

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module

    @property
    def _names(self) -> Mapping[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}


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
        return {key: _mark(item) for key, item in values.items()}
    return values
