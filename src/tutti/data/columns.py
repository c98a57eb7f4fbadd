"""Several inputs of a sample, and inputs that are sequences of unequal length.

Each input is a column. Its rows, one for each sample, are dealt, split and shuffled; the values of sequences
lie one after the other, and their rows hold the beginning and length of each:

    rows of a sequence   (0, 3) │ (3, 1) │ (4, 2)
    values                a b c    d        e f
    a batch of all        a b c    d 0 0    e f 0      lengths 3 1 2

A data set with one input of one shape, as most have, is stored without columns: `columns_of` and
`in_place_of` let both be treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, cast, overload

import torch
from torch import Tensor
from typing_extensions import TypeVar

from tutti.data.rows import Rows

T = TypeVar("T")
U = TypeVar("U")

Inputs: TypeAlias = "Tensor | dict[str, Tensor] | tuple[Tensor, ...]"
"""The inputs of some samples as a model gets them: one, several by name, or several by position."""

LENGTHS: Final = "lengths"
"""The name by which a model gets the lengths of sequences."""

MASK: Final = "attention_mask"
"""The name by which models of Hugging Face take a mask: 1 for values, 0 for what pads them."""


@dataclass(frozen=True)
class Column(Generic[T]):
    """One input of all samples."""

    # of shape (samples, ...); for sequences (samples, 2): the beginning of each among the values, and its
    # length
    rows: T
    values: T | None = None  # of the sequences, of shape (values, ...); None: the rows are the input
    longest: int = 0  # the length of the longest sequence of the data set

    def changed(self, change: Callable[[T], U]) -> Column[U]:
        """Return the column with other rows and values."""
        values = None if self.values is None else change(self.values)
        return Column(change(self.rows), values, self.longest)


@dataclass(frozen=True)
class Columns(Generic[T]):
    """The inputs of all samples, if these are several, or sequences."""

    columns: tuple[Column[T], ...]  # one for each input
    # of the inputs, which the model takes by keyword; empty: it takes them by position
    names: tuple[str, ...] = ()
    # what the model gets besides sequences: `LENGTHS`, of each; `MASK`, of the first; "", nothing
    beside: str = LENGTHS


Stored: TypeAlias = T | Columns[T]
"""The inputs of all samples: one input of one shape, or columns."""


@overload
def columns_of(stored: Stored[Tensor]) -> tuple[Column[Tensor], ...]: ...


@overload
def columns_of(stored: Stored[Rows]) -> tuple[Column[Rows], ...]: ...


def columns_of(stored: Any) -> tuple[Column[Any], ...]:
    """Return the inputs as columns: a single one, if they are no columns."""
    return stored.columns if isinstance(stored, Columns) else (Column(stored),)


def in_place_of(stored: object, columns: Iterable[Column[U]]) -> U | Columns[U]:
    """Return columns in the form of `stored`: a single one as its rows, if `stored` has no columns."""
    found = tuple(columns)
    return Columns(found, stored.names, stored.beside) if isinstance(stored, Columns) else found[0].rows


def named(columns: Sequence[T], names: Sequence[str]) -> dict[str, T] | tuple[T, ...]:
    """Return the items of the columns by name, or in their order if they have no names."""
    return dict(zip(names, columns, strict=True)) if names else tuple(columns)


def names_beside(stored: Columns[Any]) -> tuple[str, ...]:
    """Return the names of the extra arguments for sequences; empty texts, if inputs have none."""
    ragged = [at for at, column in enumerate(stored.columns) if column.values is not None]
    if stored.beside != LENGTHS:
        ragged = ragged[:1] if stored.beside else []
    if not stored.names:
        return ("",) * len(ragged)
    if stored.beside == MASK:
        return (MASK,) * len(ragged)
    if len(ragged) == 1:
        return (LENGTHS,)
    return tuple(f"{stored.names[at]}_{LENGTHS}" for at in ragged)


def padded(column: Column[Tensor], spans: Tensor) -> tuple[Tensor, Tensor]:
    """Copy some sequences, by their rows, padded with zeros.

    Return the values, of shape (count, longest, ...), at least one long; and the lengths, int64, (count,).
    """
    values = cast("Tensor", column.values)
    starts, lengths = spans.unbind(1)
    width = max(1, int(lengths.max())) if len(lengths) else 1
    steps = torch.arange(width, device=values.device)
    there = steps < lengths[:, None]
    found = values.new_zeros(len(spans), width, *values.shape[1:])
    found[there] = values.index_select(0, (starts[:, None] + steps)[there])
    return found, lengths.contiguous()


def mask_of(sequences: Tensor, lengths: Tensor) -> Tensor:
    """Return 1 for values of padded sequences and 0 for padding, int64, of shape (count, longest)."""
    return (torch.arange(sequences.shape[1], device=lengths.device) < lengths[:, None]).long()


def alone(column: Column[Tensor]) -> Column[Tensor]:
    """Return a column without the values of other sequences."""
    if column.values is None:
        return column
    starts, lengths = column.rows.unbind(1)
    begins = lengths.cumsum(0) - lengths
    total = torch.arange(int(lengths.sum()), device=column.rows.device)
    wanted = total + torch.repeat_interleave(starts - begins, lengths)
    rows = torch.stack([begins, lengths], dim=1)
    return Column(rows, column.values.index_select(0, wanted), column.longest)


def sequences_in(column: Column[Tensor]) -> Column[Tensor]:
    """Return inputs of shape (samples, length, ...) as sequences of that length."""
    samples, length = column.rows.shape[:2]
    begins = torch.arange(samples, device=column.rows.device) * length
    rows = torch.stack([begins, torch.full_like(begins, length)], dim=1)
    return Column(rows, column.rows.flatten(0, 1), length)


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Change each of the inputs of some samples."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, tuple):
        return tuple(map(change, inputs))
    return {name: change(one) for name, one in inputs.items()}


def each_of(inputs: Inputs) -> list[Tensor]:
    """Return the inputs of some samples one by one."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)
