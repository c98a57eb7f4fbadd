"""Inputs as a source gives them, taken apart: several by name or by position, and sequences.

x                       one input
{"image": x, "age": z}  several, which a model takes by name
(x, z)                  several, which it takes by position
[[1, 2, 3], [4]]        sequences: a list, or an array of objects, of arrays that differ in their first size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tutti.data.arrays import as_array
from tutti.data.columns import LENGTHS, Column
from tutti.data.rows import Array, Rows, StoredRows, chosen
from tutti.errors import BadData


def sequence_column(values: Rows, lengths: Array) -> Column[Rows]:
    """Return sequences in their stored form.

    `values` are those of all sequences, concatenated, of shape (values, ...); `lengths` are int64,
    (samples,).
    """
    return Column(
        np.stack([lengths.cumsum() - lengths, lengths], axis=1), values, int(lengths.max(initial=0))
    )


def values_and_lengths(column: Column[Rows]) -> tuple[Rows, Array]:
    """Return the arguments of `sequence_column`; its values may lie between those of other sequences."""
    assert column.values is not None, "they are sequences"
    spans = np.asarray(column.rows[:], np.int64)
    wanted = np.concatenate([np.arange(begin, begin + length) for begin, length in spans])
    return chosen(column.values, wanted), spans[:, 1]


@dataclass(frozen=True)
class Structure:
    """The inputs of each part of a data set, taken apart."""

    # the inputs of each part: arrays, tensors, nested lists; columns, if they are sequences
    parts: Mapping[str, tuple[Any, ...]]
    names: tuple[str, ...]  # of the inputs; empty if they have none
    single: bool  # there is one input, of one shape

    def label(self, part: str, number: int) -> str:
        """Return the name of one input of a part in messages."""
        if self.names:
            return f"{part} inputs '{self.names[number]}'"
        several = len(next(iter(self.parts.values()))) > 1
        return f"{part} inputs {number}" if several else f"{part} inputs"


def taken_apart(inputs: Mapping[str, object]) -> Structure:
    """Take the inputs of each part, by name, apart."""
    first_part, first = next(iter(inputs.items()))
    names = tuple(_by_name(first))
    parts: dict[str, list[Any]] = {}
    for part, value in inputs.items():
        found = _by_name(value)
        if found.keys() != {*names}:
            here, there = (", ".join(some) or "one input" for some in (found, names))
            raise BadData(
                f"the {part} part has the inputs {here}, and the {first_part} part {there}; all parts need "
                "the same inputs"
            )
        parts[part] = [_sequences(found[name], f"{part} inputs") for name in names]
    for number in range(len(names)):
        if any(isinstance(found[number], Column) for found in parts.values()):
            for part, several in parts.items():
                several[number] = _as_sequences(several[number], f"{part} inputs")
    single = names == ("",) and not isinstance(parts[first_part][0], Column)
    kept = {part: tuple(found) for part, found in parts.items()}
    return Structure(kept, names if isinstance(first, Mapping) else (), single)


def _by_name(value: object) -> dict[str, Any]:
    """Return inputs by their names or positions; an only one is called ""."""
    if isinstance(value, Mapping):
        wrong = next((name for name in value if not (isinstance(name, str) and name.isidentifier())), None)
        if wrong is not None or LENGTHS in value or not value:
            raise BadData(
                f"the inputs are called {', '.join(map(repr, value)) or 'nothing'}; give each a name of "
                f"letters, digits and _, by which a model takes it, but not '{LENGTHS}', which is taken"
            )
        return dict(value)
    kinds = (np.ndarray, Tensor, StoredRows, Column, list)
    if isinstance(value, tuple) and value and all(isinstance(one, kinds) for one in value):
        return {str(number): one for number, one in enumerate(value)}
    return {"": value}  # a tuple of numbers or of tuples is an array


def sequences(items: Sequence[object], what: str) -> Column[Rows]:
    """Return sequences: each is an array, a tensor or a list."""
    arrays = [as_array(one, what) for one in items]
    # An empty list has neither a shape nor a type.
    template = next((one for one in arrays if one.ndim and len(one)), arrays[0])
    for number, one in enumerate(arrays):
        if one.ndim == 0 or (len(one) and one.shape[1:] != template.shape[1:]):
            raise BadData(
                f"the {what} have the shape {one.shape} in sample {number} and {template.shape} in the "
                "first; sequences may differ in their first size alone"
            )
    values = np.concatenate([one for one in arrays if len(one)] or [template])
    return sequence_column(values, np.array([len(one) for one in arrays], dtype=np.int64))


def _sequences(value: object, what: str) -> object:
    """Return sequences of unequal length as a column, and anything else unchanged."""
    if isinstance(value, Tensor) and value.is_nested:
        return sequences(value.unbind(), what)
    objects = isinstance(value, np.ndarray) and value.dtype == object
    if not objects and not isinstance(value, list):
        return value
    items: list[Any] = [*value]  # type: ignore[misc]
    if not items or not all(isinstance(one, list | tuple | np.ndarray | Tensor) for one in items):
        return value
    if any(isinstance(one, np.ndarray | Tensor) and one.ndim == 0 for one in items):
        return value
    return sequences(items, what) if objects or len({len(one) for one in items}) > 1 else value


def _as_sequences(value: object, what: str) -> Column[Rows]:
    if isinstance(value, Column):
        return value
    array: Array = value[:] if isinstance(value, StoredRows) else as_array(value, what)
    return sequences([*array], what)
