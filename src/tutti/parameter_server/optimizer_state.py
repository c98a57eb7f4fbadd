"""An optimizer's state in memory that several processes share, so that each can make the next step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.parameter_server.base import Allocate
from tutti.replica import ALIGNMENT


@dataclass(frozen=True)
class StateEntry:
    """A value that an optimizer keeps for one parameter.

    Attributes:
        parameter: the parameter's number among the optimizer's.
        name: what the optimizer calls it.
        shape: the tensor's; () for a number.
        dtype: the tensor's, or float64.
        kind: Tensor, or the type of a number.
    """

    parameter: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type

    @property
    def length(self) -> int:
        """The number of its elements, rounded up so that the next one is aligned."""
        return -(-math.prod(self.shape) // ALIGNMENT) * ALIGNMENT


class SharedState:
    """The state of an optimizer that several processes step in turn. Whoever steps holds a lock.

    Until somebody has stepped a parameter there is no state of it: the optimizer makes it then, and its maker
    copies it here. Afterwards each process's optimizer has the shared tensors themselves; its numbers are set
    before each step and brought back after it, and so are tensors that were put in the place of shared ones.

    Args:
        parameters: those that the optimizer may keep something for.
        presence: for each cell whether there is a value, in one byte; zeros at first.
        cells: the entries and where they lie.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        presence: Tensor,
        cells: list[tuple[StateEntry, Tensor]],
    ) -> None:
        self._optimizer, self._parameters, self._cells = optimizer, parameters, cells
        self._presence, self._known = presence.numpy().data, bytes(len(cells))
        self._number = {(entry.parameter, entry.name): n for n, (entry, _) in enumerate(cells)}

    def step(self, move: Callable[[], object]) -> None:
        """Call `move`, which steps the optimizer, on the state that all share."""
        self.take()
        move()
        self.leave()

    def take(self) -> None:
        """Give the optimizer what others have left."""
        now = bytes(self._presence)
        for (entry, cell), here, known in zip(self._cells, now, self._known, strict=True):
            if here and not (known and entry.kind is Tensor):
                value = cell if entry.kind is Tensor else entry.kind(cell.item())
                self._optimizer.state[self._parameters[entry.parameter]][entry.name] = value
        self._known = now

    def leave(self) -> None:
        """Bring back what the optimizer has now.

        Raises:
            BadOption: it is something else than `describe` found.
        """
        for number, parameter in enumerate(self._parameters):
            kept = self._optimizer.state.get(parameter, {})
            for name, value in kept.items():
                at = self._number.get((number, name))
                if value is None and (at is None or not self._presence[at]):
                    continue
                entry, cell = self._cells[at] if at is not None else (None, None)
                if value is not cell:
                    kept[name] = self._bring(name, value, entry, cell)
                if at is not None:
                    self._presence[at] = 1
        self._known = bytes(self._presence)

    def _bring(self, name: str, value: object, entry: StateEntry | None, cell: Tensor | None) -> object:
        """Copy a value into its cell; returns what the optimizer is to have."""
        if entry is not None and cell is not None:
            if isinstance(value, Tensor):
                if (entry.kind, entry.shape, entry.dtype) == (Tensor, tuple(value.shape), value.dtype):
                    return cell.copy_(value)
            elif type(value) is entry.kind:
                cell.fill_(float(value))  # type: ignore[arg-type]
                return value
        raise BadOption(
            f"optimizer {type(self._optimizer).__name__} keeps '{name}' otherwise than after its first step, "
            "which the workers cannot share; set its options before the first step"
        )


def describe(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], move: Callable[[], object]
) -> list[StateEntry]:
    """List the entries that an optimizer keeps; `move` steps it to see them. Refuse what cannot be shared."""
    move()
    return [
        _entry(type(optimizer), number, name, value)
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    ]


def _entry(optimizer: type, number: int, name: str, value: object) -> StateEntry:
    if isinstance(value, Tensor):
        return StateEntry(number, name, tuple(value.shape), value.dtype, Tensor)
    if isinstance(value, bool | int | float):
        return StateEntry(number, name, (), torch.float64, type(value))
    raise BadOption(
        f"optimizer {optimizer.__name__} keeps '{name}' of type {type(value).__name__} for each parameter, "
        "which the workers cannot share; only tensors and numbers can be. Let each worker run it by itself: "
        "'--strategy downpour --strategy.side worker'"
    )


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
            cell = vectors[entry.dtype][start : start + math.prod(entry.shape)].view(entry.shape)
            cells.append((entry, cell))
        states.append(SharedState(optimizer, parameters, allocate(len(entries), torch.uint8), cells))
    return states
