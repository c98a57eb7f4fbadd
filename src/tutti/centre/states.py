"""An optimizer's state in memory that several processes share, so that each can make the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tutti.centre.base import Allocate
from tutti.errors import BadOption
from tutti.optim.runs import Run, is_parameterwise
from tutti.optim.sharded import Piece
from tutti.replica import ALIGNMENT

_TORCHS: Final = frozenset(vars(SGD([torch.zeros(1)]))) | {
    "_opt_called",
    "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling",
    "step",
}
"""Attributes that torch itself gives an optimizer."""

_HOLDERS: Final = (list, dict, set, deque)

BY_ITSELF: Final = "Let each worker run it by itself: '--strategy downpour --strategy.side worker'"


@dataclass(frozen=True)
class Entry:
    """One thing that an optimizer keeps for one parameter, or counts in its param group.

    Attributes:
        run: which of the pieces' runs it belongs to, counted over all pieces.
        parameter: which of the run's parameters has it; None: the run's group.
        name: what the optimizer calls it.
        shape: the tensor's; None for a number or for nothing.
        dtype: the tensor's, or float64.
        kind: the type of a number; Tensor; or NoneType.
    """

    run: int
    parameter: int | None
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
    Afterwards each optimizer has the shared tensors themselves; its numbers are set before each step and
    brought back after it, and so are tensors that it has put in the place of the shared ones.

    Args:
        begun: one number, 0 until the first step.
        cells: where each entry lies.
    """

    def __init__(self, begun: Tensor, cells: list[tuple[Entry, Tensor]]) -> None:
        self._begun, self._cells = begun, cells
        self._numbers = [(entry, cell) for entry, cell in cells if entry.kind in (bool, int, float)]
        self._tensors = [(entry, cell) for entry, cell in cells if entry.kind is Tensor]
        self._adopted = False

    def step(self, pieces: tuple[Piece, ...]) -> None:
        """Move the pieces' weights.

        Raises:
            BadOption: the optimizer keeps something that it did not keep after its first step.
        """
        runs = _runs(pieces)
        if not self._adopted and self._begun.item():
            self._adopt(runs)
        for entry, cell in self._numbers if self._adopted else ():
            _state(runs, entry)[entry.name] = entry.kind(cell.item())
        for piece in pieces:
            piece.step()
        if self._adopted:
            self._bring_back(runs)
        else:
            self._publish(runs)

    def _bring_back(self, runs: Sequence[Run]) -> None:
        for entry, cell in self._numbers:
            cell.fill_(float(_state(runs, entry)[entry.name]))
        for entry, cell in self._tensors:
            state = _state(runs, entry)
            if state[entry.name] is not cell:
                cell.copy_(state[entry.name])
                state[entry.name] = cell
        kept = sum(
            len(run.optimizer.state.get(parameter, ())) for run in runs for parameter in _parameters(run)
        )
        if kept != sum(entry.parameter is not None for entry, _ in self._cells):
            raise BadOption(
                f"optimizer {type(runs[0].optimizer).__name__} keeps other things for its parameters than "
                f"after its first step, which the workers cannot share. {BY_ITSELF}"
            )

    def _publish(self, runs: Sequence[Run]) -> None:
        for entry, cell in self._cells:
            value = _state(runs, entry).get(entry.name)
            if entry.kind is Tensor:
                assert value is not None
                cell.copy_(value)
            elif entry.kind is not type(None):
                cell.fill_(float(value or 0))
        self._begun.fill_(1)
        self._adopt(runs)

    def _adopt(self, runs: Sequence[Run]) -> None:
        for entry, cell in self._cells:
            if entry.parameter is not None or entry.kind is Tensor:
                _state(runs, entry)[entry.name] = cell if entry.kind is Tensor else None
        self._adopted = True


def describe(pieces: Sequence[Piece]) -> list[Entry]:
    """What the optimizers of these pieces keep; they are stepped to see it.

    Raises:
        BadOption: something that cannot be shared.
    """
    before = [_attributes(run.optimizer) for run in _runs(pieces)]
    for piece in pieces:
        piece.step()
    entries = []
    for number, run in enumerate(_runs(pieces)):
        kind = type(run.optimizer)
        for name, value in _attributes(run.optimizer).items():
            if before[number].get(name) != value:
                raise BadOption(
                    f"optimizer {kind.__name__} changes its attribute '{name}' in a step, which the workers "
                    f"cannot share; only what is in its state or its param groups can be. {BY_ITSELF}"
                )
        for at, parameter in enumerate(_parameters(run)):
            for name, value in run.optimizer.state.get(parameter, {}).items():
                entries.append(_entry(kind, number, at, name, value))
        entries += [_entry(kind, number, None, name, value) for name, value in run.counted.items()]
    return entries


def _attributes(optimizer: Optimizer) -> dict[str, tuple[object, ...]]:
    """Signs that an attribute has changed, by its name; what torch keeps in attributes can be left out."""
    return {
        name: (id(value), getattr(value, "_version", 0), len(value) if isinstance(value, _HOLDERS) else 0)
        for name, value in vars(optimizer).items()
        if name not in _TORCHS and not is_parameterwise(optimizer)
    }


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


def _entry(optimizer: type, run: int, parameter: int | None, name: str, value: object) -> Entry:
    if isinstance(value, Tensor):
        return Entry(run, parameter, name, tuple(value.shape), value.dtype, Tensor)
    if value is None or isinstance(value, bool | int | float):
        return Entry(run, parameter, name, None, torch.float64, type(value))
    where = "its param group" if parameter is None else "each parameter"
    raise BadOption(
        f"optimizer {optimizer.__name__} keeps '{name}' of type {type(value).__name__} for {where}, which "
        f"the workers cannot share; only tensors and numbers can be. {BY_ITSELF}"
    )


def _runs(pieces: Sequence[Piece]) -> list[Run]:
    return [run for piece in pieces for run in piece.runs]


def _parameters(run: Run) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = run.optimizer.param_groups[0]["params"]
    return parameters


def _state(runs: Sequence[Run], entry: Entry) -> dict[str, Any]:
    """Where the optimizer itself looks for an entry."""
    run = runs[entry.run]
    if entry.parameter is None:
        return run.optimizer.param_groups[0]
    state: dict[str, Any] = run.optimizer.state[_parameters(run)[entry.parameter]]
    return state
