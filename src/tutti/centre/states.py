"""An optimizer's state in memory that several processes share, so that each can make the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.centre.base import Allocate
from tutti.errors import BadOption
from tutti.optim.sharded import Piece
from tutti.replica import ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """One thing that an optimizer keeps for one parameter.

    Attributes:
        run: which of the pieces' runs has the parameter, counted over all pieces.
        parameter: which of the run's parameters it is.
        name: what the optimizer calls it.
        shape: the tensor's; None for a number or for nothing.
        dtype: the tensor's, or float64.
        kind: the type of a number; Tensor; or NoneType.
    """

    run: int
    parameter: int
    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    kind: type

    @property
    def length(self) -> int:
        """How many elements it takes, rounded up so that the next one is aligned."""
        count = 1
        for size in self.shape or ():
            count *= size
        return -(-count // ALIGNMENT) * ALIGNMENT


class SlotState:
    """The state of a slot's optimizers. Whoever steps holds the slot's lock.

    Until the first step of all there is no state: the optimizer makes it then, and its maker copies it here.

    Args:
        begun: one number, 0 until the first step.
        cells: where each entry lies.
    """

    def __init__(self, begun: Tensor, cells: list[tuple[Entry, Tensor]]) -> None:
        self._begun, self._cells = begun, cells
        self._numbers = [(entry, cell) for entry, cell in cells if entry.kind in (bool, int, float)]
        self._adopted = False

    def step(self, pieces: tuple[Piece, ...]) -> None:
        """Move the pieces' weights."""
        if self._adopted and not self._numbers:
            for piece in pieces:
                piece.step()
            return
        if not self._adopted and self._begun.item():
            self._adopt(pieces)
        for entry, cell in self._numbers if self._adopted else ():
            _state(pieces, entry)[entry.name] = entry.kind(cell.item())
        for piece in pieces:
            piece.step()
        if self._adopted:
            for entry, cell in self._numbers:
                cell.fill_(float(_state(pieces, entry)[entry.name]))
        else:
            self._publish(pieces)

    def _publish(self, pieces: tuple[Piece, ...]) -> None:
        for entry, cell in self._cells:
            value = _state(pieces, entry).get(entry.name)
            if entry.kind is Tensor:
                assert value is not None
                cell.copy_(value)
            elif entry.kind is not type(None):
                cell.fill_(float(value or 0))
        self._begun.fill_(1)
        self._adopt(pieces)

    def _adopt(self, pieces: tuple[Piece, ...]) -> None:
        for entry, cell in self._cells:
            _state(pieces, entry)[entry.name] = cell if entry.kind is Tensor else None
        self._adopted = True


def describe(pieces: Sequence[Piece]) -> list[Entry]:
    """What the optimizers of these pieces keep; they are stepped to see it.

    Raises:
        BadOption: something that cannot be shared.
    """
    for piece in pieces:
        piece.step()
    entries = []
    for number, run in enumerate(_runs(pieces)):
        for at, parameter in enumerate(_parameters(run)):
            for name, value in run.optimizer.state.get(parameter, {}).items():
                entries.append(_entry(type(run.optimizer), number, at, name, value))
    return entries


def allocate_states(described: Sequence[list[Entry]], allocate: Allocate) -> list[SlotState]:
    """Set memory aside for what the optimizers of several slots keep (collective)."""
    lengths: dict[torch.dtype, int] = {}
    for entry in (entry for entries in described for entry in entries):
        lengths[entry.dtype] = lengths.get(entry.dtype, 0) + entry.length
    vectors = {dtype: allocate(length, dtype) for dtype, length in lengths.items()}
    begun = allocate(len(described), torch.int64)
    taken = dict.fromkeys(lengths, 0)
    states = []
    for number, entries in enumerate(described):
        cells = []
        for entry in entries:
            start = taken[entry.dtype]
            taken[entry.dtype] = start + entry.length
            count = max(1, torch.Size(entry.shape or ()).numel())
            cell = vectors[entry.dtype][start : start + count].view(entry.shape or ())
            cells.append((entry, cell))
        states.append(SlotState(begun[number], cells))
    return states


def _entry(optimizer: type, run: int, parameter: int, name: str, value: object) -> Entry:
    if isinstance(value, Tensor):
        return Entry(run, parameter, name, tuple(value.shape), value.dtype, Tensor)
    if value is None or isinstance(value, bool | int | float):
        return Entry(run, parameter, name, None, torch.float64, type(value))
    raise BadOption(
        f"optimizer {optimizer.__name__} keeps '{name}' of type {type(value).__name__} for each parameter, "
        "which the workers cannot share; only tensors and numbers can be. Let each worker run it by itself: "
        "'--strategy downpour --strategy.side worker'"
    )


def _runs(pieces: Sequence[Piece]) -> list[Any]:
    return [run for piece in pieces for run in piece.runs]


def _parameters(run: Any) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = run.optimizer.param_groups[0]["params"]
    return parameters


def _state(pieces: Sequence[Piece], entry: Entry) -> dict[str, Any]:
    run = _runs(pieces)[entry.run]
    state: dict[str, Any] = run.optimizer.state[_parameters(run)[entry.parameter]]
    return state
