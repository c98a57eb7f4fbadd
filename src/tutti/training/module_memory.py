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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from time import perf_counter
from typing import Any, Final, NamedTuple, cast
from weakref import WeakSet

import cloudpickle
import torch
from torch import Tensor, nn

from tutti.checksum import checksum
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.object_state import as_values, from_values
from tutti.optim.attribute_memory import Stretches, extent
from tutti.optim.attribute_reader import AttributeReader
from tutti.optim.attributes import (
    OF_MODULES,
    AttributeLeaf,
    AttributeWriter,
    is_recomputed,
    leaves_in,
    lost_in,
)
from tutti.state import Values, in_own_memory
from tutti.training.evaluation import load_buffers, named_buffers

_MODULES: Final[WeakSet[nn.Module]] = WeakSet()
"""Those that a memory knows of: a loss may know the model, which goes on by itself."""

_LOOKS: Final = 100
"""How many times as long as a look took the next one is waited for."""


class _Found(NamedTuple):
    path: str
    value: Any
    values: Any


class ModuleMemory:
    """The extra states of a model's modules, and those of their attributes that have changed.

    Attributes are numbers, texts, tensors, generators of random numbers, modules that the model does not know
    of, and lists, sets and dictionaries of them; those of parameters and buffers count as well. What cannot
    be told from what it was is kept, too.

    Args:
        module: the model, before it is trained.
        modes: nobody else says how it is trained: the mode of each module is kept as well, and which
            parameters need gradients.
    """

    def __init__(self, module: nn.Module, modes: bool = False) -> None:
        self._module = module
        self._of_torch = OF_MODULES - {"training"} if modes else OF_MODULES
        self._needed = {name: one.requires_grad for name, one in module.named_parameters() if modes}
        _MODULES.update(module.modules())
        # The things themselves stay, so that no others get their memory.
        self._before = list(self._all())
        self._lost: set[str] = set()
        self._asked, self._looked_at, self._took_s = 0, 0.0, 0.0
        self._own = Stretches(extent(one) for _, _, values in self._before for one in _tensors_in(values))
        self._marks = {path: _mark(values) for path, _, values in self._before}
        self._leaves = {leaf for path, _, values in self._before for leaf in _leaves(path, values)}
        self._pickles = {
            path: _pickle(value) for path, value, values in self._before if any(lost_in(values, path))
        }

    def state(self) -> Values:
        """Return what the modules know now; the tensors are live.

        Raises:
            BadOption: an extra state has something that no checkpoint can have.
        """
        extra = {
            name: as_values(module.get_extra_state(), f"the extra state of '{name}'")
            for name, module in self._with_extra_state()
        }
        return {**self._known(), "extra": extra}

    def noted(self) -> Values:
        """Return what they know besides their modes and their `state_dict`; the tensors are live.

        And which attributes have tensors in the place of those that they had at first.
        """
        known, stored = _without_modes(self._known(last=True)), self._module.state_dict().keys()
        buffers = {name: one for name, one in self._module.named_buffers() if name not in stored}
        exchanged = [
            path
            for path, values in known["attributes"].items()
            if not all(map(self._own.around, _tensors_in(values)))
        ]
        return {**known, "buffers": buffers, "exchanged": exchanged}

    def copied(self) -> Values:
        """Return a copy of what they know, without modes."""
        extra = dict[str, Any]()
        for name, module in self._with_extra_state():
            state = module.get_extra_state()
            try:
                extra[name] = as_values(state, f"the extra state of '{name}'")
            except BadOption:  # No checkpoint is asked for.
                extra[name] = deepcopy(state)
        changes = _without_modes(self._changes(list(self._all())))
        return cast("Values", in_own_memory(_in_dictionaries({**changes, "extra": extra})))

    def all_copied(self) -> Values:
        """Return a copy of all attributes that can be kept, changed or not, without modes."""
        found = {
            path: values
            for path, _, values in self._all()
            # Those without values are torch's own, such as the shapes of what a pipeline's stages exchange.
            if _is_kept(values) and not any(one.is_meta for one in _tensors_in(values))
        }
        known = _without_modes({"attributes": found})
        return cast("Values", in_own_memory(_in_dictionaries(known["attributes"])))

    def go_back(self, first: Values, known: Values) -> None:
        """Have the modules know what they knew before, and nothing of what came later.

        Args:
            first: what `all_copied` returned when this was made.
            known: what `copied` has returned since.
        """
        changes = _without_modes(self._changes(list(self._all())))
        changed = {*changes["attributes"], *changes["gone"]}
        shared = {path for path, values in first.items() if _is_shared(values)}
        if shared & changed:
            changed |= shared
        begun = {
            "attributes": {path: values for path, values in first.items() if path in changed},
            "needed": {name: self._needed[name] for name in changes["needed"]},
            "gone": sorted(changed - self._marks.keys()),
        }
        self.load_state(begun, anew=True)
        self.load_state(known, anew=True)

    def meet(self, comm: Communicator) -> None:
        """Have the modules of all ranks know what rank 0's know, but for their modes (collective)."""
        if comm.size == 1:
            return
        extra = [module for _, module in self._with_extra_state()]
        states = [module.get_extra_state() for module in extra]
        found = list(self._all())
        mine = {part: set(names) for part, names in _without_modes(self._changes(found)).items()}
        # What only others have changed, rank 0 tells as well.
        touched = cast("list[dict[str, set[str]]]", comm.all_gather_objects(mine))
        anywhere = {part: set[str]().union(*(one[part] for one in touched)) for part in mine}
        told = (_without_modes(self._changes(found, anywhere)), states) if comm.rank == 0 else None
        known, states = cast("tuple[Values, list[Any]]", comm.broadcast_object(told))
        if comm.rank > 0:
            self.load_state(known, anew=True)
            for module, state in zip(extra, states, strict=True):
                module.set_extra_state(state)

    def _known(self, last: bool = False) -> Values:
        found = list(self._all())
        self._note_lost(found, last)
        return {**self._changes(found), "lost": sorted(self._lost)}

    def _changes(self, found: Sequence[_Found], also: Mapping[str, Set[str]] | None = None) -> Values:
        """Return what is not as it was; and `also` all that is named there, as it is."""
        also = also or dict.fromkeys(("attributes", "needed", "gone"), frozenset())
        needed = {
            name: one.requires_grad
            for name, one in self._module.named_parameters()
            if name in also["needed"] or one.requires_grad != self._needed.get(name, one.requires_grad)
        }
        paths = also["attributes"] | also["gone"]
        gone = sorted((self._marks.keys() | paths) - {path for path, _, _ in found})
        return {
            "attributes": self._changed(found, paths),
            "needed": needed,
            "gone": gone,
        }

    def load_state(self, values: Values, anew: bool = False) -> None:
        """Have the modules know what others of the same names knew.

        Args:
            values: from them.
            anew: no tensor is written to but those that the modules had at first: an attribute may be a
                batch, which is a part of the data.
        """
        owners, own = dict(self._owners()), self._own if anew else None
        reader, exchanged = AttributeReader(self._names()), {*values.get("exchanged", [])}
        for path, found in values.get("attributes", {}).items():
            reader.own = Stretches(()) if path in exchanged else own
            name, _, attribute = path.rpartition("/")
            if name in owners:
                with torch.no_grad():
                    reader.set_attributes(owners[name], {attribute: found})
        for path in values.get("gone", []):
            name, _, attribute = path.rpartition("/")
            if name in owners and attribute in vars(owners[name]):
                delattr(owners[name], attribute)
        parameters = dict(self._module.named_parameters())
        for name, needed in values.get("needed", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(needed)
        if buffers := values.get("buffers"):
            there = named_buffers(self._module)
            load_buffers(
                self._module,
                {**there, **{name: _as_there(one, there.get(name)) for name, one in buffers.items()}},
            )
        for name, module in self._with_extra_state():
            if name in values.get("extra", {}):
                module.set_extra_state(from_values(values["extra"][name]))

    def _changed(self, found: Iterable[_Found], also: Set[str]) -> Values:
        """Return the attributes that are not what they were; of objects in several places, all the places."""
        attributes = {path: values for path, _, values in found if _is_kept(values)}
        changed = {
            path
            for path, values in attributes.items()
            if path in also or self._marks.get(path) != _mark(values)
        }
        shared = {path for path, values in attributes.items() if _is_shared(values)}
        if shared & changed:
            changed |= shared
        return {path: values for path, values in attributes.items() if path in changed}

    def _all(self) -> Iterator[_Found]:
        """Yield all attributes of the modules, their parameters and buffers."""
        found = [
            (f"{name}/{attribute}", value)
            for name, owner in self._owners()
            for attribute, value in vars(owner).items()
            if attribute not in self._of_torch or not isinstance(owner, nn.Module)
            if not is_recomputed(owner, attribute)
        ]
        writer = AttributeWriter(self._names(), elsewhere=_MODULES)
        writer.count(value for _, value in found)
        for path, value in found:
            yield _Found(path, value, writer.values(value))

    def _note_lost(self, found: Iterable[_Found], last: bool) -> None:
        """Note what cannot be kept and is not what it was; what takes time, less often, and at the `last`."""
        began = perf_counter()
        self._asked += 1
        rarely = self._asked & (self._asked - 1) == 0
        looks = last or rarely or began >= self._looked_at + _LOOKS * self._took_s
        for path, value, values in found:
            if type(value).__module__.split(".")[0] == "tutti":  # such as what draws a dropout layer's masks
                continue
            for _, _, kind in _leaves(path, values) - self._leaves:
                self._lost.add(f"'{_shown(path)}' ({kind}) of the model")
            lost = set(lost_in(values, _shown(path))) if looks else set()
            if lost and (path not in self._pickles or _pickle(value) != self._pickles[path]):
                self._lost |= {f"{one} of the model" for one in lost}
        if looks:
            self._looked_at = perf_counter()
            self._took_s = self._looked_at - began

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """Yield what has attributes, by name: modules, parameters and buffers."""
        yield from self._module.named_modules()
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if type(tensor) in (Tensor, nn.Parameter):
                yield name, tensor

    def _names(self) -> dict[Any, str]:
        module = self._module
        named = (*module.named_modules(), *module.named_parameters(), *module.named_buffers())
        return {thing: name for name, thing in named}

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what belongs to an attribute alone, without the model that it may know."""

    def persistent_id(self, thing: Any) -> str | None:
        return f"{type(thing).__name__} {id(thing)}" if isinstance(thing, nn.Module | nn.Parameter) else None


def _pickle(value: Any) -> bytes | None:
    """Return what tells whether a value is still what it was; None: nothing does."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except Exception:  # Whatever a class of somebody's raises.
        return None
    return hashlib.sha256(written.getbuffer()).digest()


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of values, but for gradients."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for key, item in values.items():
            yield from _tensors_in(item[2] if key == "/leaf" else item)
    elif isinstance(values, list):
        for item in values:
            yield from _tensors_in(item)


def _as_there(value: Tensor, there: Tensor | None) -> Tensor:
    """Return a value in the precision of what is there, as that of the ranks may be another one."""
    if there is None or not (there.is_floating_point() and value.is_floating_point()):
        return value
    return value.to(there.dtype)


def _without_modes(known: Values) -> Values:
    attributes = known["attributes"].items()
    return {
        **known,
        "attributes": {path: one for path, one in attributes if not path.endswith("/training")},
    }


def _shown(path: str) -> str:
    return path.lstrip("/").replace("/", ".")


def _in_dictionaries(values: Any) -> Any:
    """Return values with plain dictionaries in the place of leaves: their tensors are copied as well."""
    if type(values) is list:
        return [_in_dictionaries(item) for item in values]
    if isinstance(values, AttributeLeaf) or type(values) is dict:
        return {key: _in_dictionaries(item) for key, item in values.items()}
    return values


def _is_kept(values: Any) -> bool:
    return not (isinstance(values, dict) and values.keys() & {"/same", "/lost"})


def _is_shared(values: Any) -> bool:
    """Tell whether an attribute has an object that is found elsewhere, too, or memory that is."""
    if isinstance(values, dict):
        return bool(values.keys() & {"/one", "/as", "/view"}) or any(map(_is_shared, values.values()))
    return isinstance(values, list) and any(map(_is_shared, values))


def _leaves(path: str, values: Any) -> set[tuple[str, Hashable, str]]:
    """Return the places of what has no values, such as functions, what there is, and its type."""
    return {
        (place.replace("//hidden/0", ""), leaf.identity, leaf.says)
        for place, leaf in leaves_in(values, path)
        if leaf.counts
    }


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
    if isinstance(values, AttributeLeaf) and not values.is_written:
        return (*values, values.identity)
    if isinstance(values, dict):
        return [(key, _mark(item)) for key, item in values.items()]  # Their order may count.
    return type(values), values.hex() if isinstance(values, float) else values
