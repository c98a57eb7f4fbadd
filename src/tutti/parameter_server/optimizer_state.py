"""An optimizer's state in memory that several processes share, so that each can make the next step."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tutti.errors import BadOption
from tutti.optim.parameterwise import is_parameterwise
from tutti.parameter_server.base import Allocate
from tutti.replica import ALIGNMENT

_HOLDERS: Final = (list, dict, set, deque)

BY_ITSELF: Final = "Let each worker run it by itself: '--strategy downpour --strategy.side worker'"


@cache
def _attributes_of_torch() -> frozenset[str]:
    """Return the attributes that torch itself gives an optimizer.

    Making the first optimizer of a process imports the compiler of torch, which takes a second.
    """
    later = {"_opt_called", "_need_device_dtype_check_for_fused", "_step_supports_amp_scaling", "step"}
    return frozenset(vars(SGD([torch.zeros(1)]))) | later


@dataclass(frozen=True)
class StateEntry:
    """A value that an optimizer keeps for one parameter, or counts in a param group.

    Attributes:
        in_group: whether a param group has it, not a parameter.
        number: which of the optimizer's groups or of its parameters that is.
        name: what the optimizer calls it.
        shape: the tensor's; None for a number or for nothing.
        dtype: the tensor's, or float64.
        kind: the type of a number; Tensor; or NoneType.
    """

    in_group: bool
    number: int
    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    kind: type

    @property
    def length(self) -> int:
        """The number of its elements, rounded up so that the next one is aligned."""
        return -(-math.prod(self.shape or ()) // ALIGNMENT) * ALIGNMENT


class Presence(IntEnum):
    """The forms of an entry in the optimizers that share a state."""

    UNKNOWN = 0
    HERE = 1
    NONE = 2


class SharedState:
    """The state of an optimizer that several processes step in turn. Whoever steps holds a lock.

    Until somebody has stepped a parameter there is no state of it: the optimizer makes it then, and its maker
    copies it here. Afterwards each process' optimizer has the shared tensors themselves; its numbers are set
    before each step and brought back after it, and so are tensors that it has put in the place of the shared
    ones.

    Args:
        parameters: those that it may keep something for.
        presence: for each entry what there is of it, in one byte; zeros at first.
        cells: where each entry lies.

    Attributes:
        of_groups: what the optimizer counts in its param groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        presence: Tensor,
        cells: list[tuple[StateEntry, Tensor]],
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._presence, self._cells = presence.numpy().data, cells
        self._known = bytes(len(cells))
        self.of_groups = [entry for entry, _ in cells if entry.in_group]

    def step(self, move: Callable[[], object]) -> None:
        """Call `move`, which steps the optimizer, on the state that all share; refuse what `check` does."""
        self.take()
        move()
        self.leave()

    def take(self) -> None:
        """Give the optimizer what others have left."""
        now = bytes(self._presence)
        for (entry, cell), here, before in zip(self._cells, now, self._known, strict=True):
            if here == Presence.HERE and entry.kind is not Tensor:
                self._home(entry)[entry.name] = entry.kind(cell.item())
            elif here != before:
                self._home(entry)[entry.name] = cell if here == Presence.HERE else None
        self._known = now

    def leave(self) -> None:
        """Bring back what the optimizer has now; refuse what `check` does."""
        self.check()
        for number, (entry, cell) in enumerate(self._cells):
            value = self._value(entry)
            if value is _NOTHING:
                continue
            self._presence[number] = Presence.HERE if value is not None else Presence.NONE
            if value is None or value is cell:
                continue
            if entry.kind is Tensor:
                cell.copy_(value)
                self._home(entry)[entry.name] = cell
            else:
                cell.fill_(float(value))
        self._known = bytes(self._presence)

    def check(self) -> None:
        """Refuse, by `BadOption`, what the optimizer has if it is something else than was looked for."""
        kept = 0
        for entry, _ in self._cells:
            value = self._value(entry)
            kept += value is not _NOTHING and not entry.in_group
            if value is not _NOTHING and value is not None and not _is_like(value, entry):
                kept = -1
                break
        if kept != sum(len(self._optimizer.state.get(parameter, ())) for parameter in self._parameters):
            raise BadOption(
                f"optimizer {type(self._optimizer).__name__} keeps other things for its parameters than "
                f"after its first step, which the workers cannot share. {BY_ITSELF}"
            )

    def counts(self) -> dict[str, Any]:
        """Return what the optimizer counts in its param groups, as it has been taken."""
        counts = {entry.name: self._value(entry) for entry in self.of_groups}
        return {name: value for name, value in counts.items() if value is not _NOTHING}

    def clear(self) -> None:
        """Reset to the state before any step."""
        self._presence[:] = bytes(len(self._cells))

    def forget(self) -> None:
        """Note that the optimizer has none of the shared tensors."""
        self._known = bytes(len(self._cells))

    def copy(self) -> dict[Any, dict[str, Any]]:
        """Copy the state of each parameter."""
        found: dict[Any, dict[str, Any]] = {}
        for (entry, cell), here in zip(self._cells, self._presence, strict=True):
            if here and not entry.in_group:
                value: object = None
                if here == Presence.HERE:
                    value = cell.clone() if entry.kind is Tensor else entry.kind(cell.item())
                found.setdefault(self._parameters[entry.number], {})[entry.name] = value
        return found

    def _home(self, entry: StateEntry) -> dict[str, Any]:
        """Return the dict in which the optimizer looks for an entry."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return groups[entry.number] if entry.in_group else state[self._parameters[entry.number]]

    def _value(self, entry: StateEntry) -> Any:
        """Return the optimizer's own value of an entry, or `_NOTHING`."""
        # Not `_home`: looking would make an empty state.
        known = entry.in_group or self._parameters[entry.number] in self._optimizer.state
        return self._home(entry).get(entry.name, _NOTHING) if known else _NOTHING


_NOTHING: Final = object()


def _is_like(value: object, entry: StateEntry) -> bool:
    if isinstance(value, Tensor):
        return entry.kind is Tensor and tuple(value.shape) == entry.shape and value.dtype == entry.dtype
    return type(value) is entry.kind


def describe(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], move: Callable[[], object]
) -> list[StateEntry]:
    """List the entries that an optimizer keeps; `move` steps it to see them. Refuse what cannot be shared."""
    before, kind = _attributes(optimizer), type(optimizer)
    options = [_versions(group) for group in optimizer.param_groups]
    move()
    for name, value in _attributes(optimizer).items():
        if before.get(name) != value:
            raise BadOption(
                f"optimizer {kind.__name__} changes its attribute '{name}' in a step, which the workers "
                f"cannot share; only what is in its state or its param groups can be. {BY_ITSELF}"
            )
    of_parameters = [
        _entry(kind, False, number, name, value)
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    ]
    of_groups = [
        _entry(kind, True, number, name, value)
        for number, (old, new) in enumerate(zip(options, optimizer.param_groups, strict=True))
        for name, value in new.items()
        if name != "params" and old.get(name) != _versions({name: value})[name]
    ]
    return of_parameters + of_groups


def _versions(options: dict[str, Any]) -> dict[str, tuple[object, ...]]:
    """Return the version of each option, by its name."""
    return {name: (id(value), value, getattr(value, "_version", 0)) for name, value in options.items()}


def _attributes(optimizer: Optimizer) -> dict[str, tuple[object, ...]]:
    """Return the version of each attribute, by its name, without those of torch's own."""
    return {
        name: (id(value), getattr(value, "_version", 0), len(value) if isinstance(value, _HOLDERS) else 0)
        for name, value in vars(optimizer).items()
        if name not in _attributes_of_torch() and not is_parameterwise(optimizer)
    }


def allocate_states(
    owners: Sequence[tuple[Optimizer, Sequence[nn.Parameter]]],
    described: Sequence[list[StateEntry]],
    allocate: Allocate,
) -> list[SharedState]:
    """Set memory aside for the states of several optimizers (collective).

    Args:
        owners: this process's optimizers, and the parameters that they may keep something for.
        described: what each of them keeps.
        allocate: makes the memory.
    """
    lengths, taken = Counter[torch.dtype](), Counter[torch.dtype]()
    for entry in (entry for entries in described for entry in entries):
        lengths[entry.dtype] += entry.length
    vectors = {dtype: allocate(length, dtype) for dtype, length in lengths.items()}
    states = []
    for (optimizer, parameters), entries in zip(owners, described, strict=True):
        cells = []
        for entry in entries:
            start = taken[entry.dtype]
            taken[entry.dtype] += entry.length
            count = torch.Size(entry.shape or ()).numel()
            cell = vectors[entry.dtype][start : start + count].view(entry.shape or ())
            cells.append((entry, cell))
        states.append(SharedState(optimizer, parameters, allocate(len(entries), torch.uint8), cells))
    return states


def _entry(optimizer: type, in_group: bool, number: int, name: str, value: object) -> StateEntry:
    if isinstance(value, Tensor):
        return StateEntry(in_group, number, name, tuple(value.shape), value.dtype, Tensor)
    if value is None or isinstance(value, bool | int | float):
        return StateEntry(in_group, number, name, None, torch.float64, type(value))
    where = "its param group" if in_group else "each parameter"
    raise BadOption(
        f"optimizer {optimizer.__name__} keeps '{name}' of type {type(value).__name__} for {where}, which "
        f"the workers cannot share; only tensors and numbers can be. {BY_ITSELF}"
    )
