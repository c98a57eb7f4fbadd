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
    """A tensor that an optimizer keeps for one parameter, which is named by its number."""

    parameter: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """The number of its elements, rounded up so that the next one is aligned."""
        return -(-math.prod(self.shape) // ALIGNMENT) * ALIGNMENT


class SharedState:
    """The state of an optimizer that several processes step in turn, each behind the slot's lock.

    The process that makes a parameter's first step copies its state here; from then on all processes'
    optimizers have the shared tensors. A tensor that replaces a shared one is copied into it after the step.
    `presence` has a byte for each entry, 1 once it has a value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        presence: Tensor,
        entries: list[tuple[StateEntry, Tensor]],
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._presence, self._known = presence.numpy().data, bytes(len(entries))
        self._entries = {
            (entry.parameter, entry.name): (number, cell) for number, (entry, cell) in enumerate(entries)
        }

    def step(self, move: Callable[[], object]) -> None:
        """Call `move`, which steps the optimizer, on the state that all share."""
        self.take()
        move()
        self.leave()

    def take(self) -> None:
        """Give the optimizer the tensors that other processes have made."""
        present = bytes(self._presence)
        if present == self._known:
            return
        for (parameter, name), (number, cell) in self._entries.items():
            if present[number]:
                self._optimizer.state[self._parameters[parameter]][name] = cell
        self._known = present

    def leave(self) -> None:
        """Copy the tensors that the optimizer has made."""
        for number, parameter in enumerate(self._parameters):
            kept = self._optimizer.state.get(parameter, {})
            for name, value in kept.items():
                if value is None:
                    continue
                at, cell = self._entries[number, name]
                if value is not cell:
                    kept[name] = cell.copy_(value)
                    self._presence[at] = 1
        self._known = bytes(self._presence)


def describe(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], move: Callable[[], object]
) -> list[StateEntry]:
    """List the entries that an optimizer keeps; `move` steps it to see them. Refuse what cannot be shared."""
    move()
    found = []
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found.append(StateEntry(number, name, tuple(value.shape), value.dtype))
            elif value is not None:
                raise BadOption(
                    f"optimizer {type(optimizer).__name__} keeps '{name}' of type {type(value).__name__} for "
                    "each parameter, and the workers can share only tensors; let each worker run it: "
                    "'--strategy downpour --strategy.side worker'"
                )
    return found


def allocate_states(
    owners: Sequence[tuple[Optimizer, Sequence[nn.Parameter]]],
    described: Sequence[list[StateEntry]],
    allocate: Allocate,
) -> list[SharedState]:
    """Set memory aside for the states of several optimizers, as `described` (collective)."""
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
