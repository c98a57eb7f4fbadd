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


@dataclass(frozen=True)
class Sequences:
    """Sequences of unequal length.

    Attributes:
        values: of all of them, one after the other, of shape (values, ...).
        lengths: of each, int64, of shape (samples,).
    """

    values: Rows
    lengths: Array

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, column: Column[Rows]) -> Sequences:
        """Return the sequences of a column; the values of others may lie between theirs."""
        assert column.values is not None, "they are sequences"
        spans = np.asarray(column.rows[:], np.int64)
        wanted = np.concatenate([np.arange(begin, begin + length) for begin, length in spans])
        return cls(chosen(column.values, wanted), spans[:, 1])

    @property
    def column(self) -> Column[Rows]:
        """The sequences as they are kept."""
        begins = self.lengths.cumsum() - self.lengths
        return Column(np.stack([begins, self.lengths], axis=1), self.values, int(self.lengths.max(initial=0)))


@dataclass(frozen=True)
class Structure:
    """The inputs of each part of a data set, taken apart.

    Attributes:
        parts: of each part the inputs: arrays, tensors, nested lists; columns, where they are sequences.
        names: of the inputs; empty where they have none.
        single: there is one input, of one shape.
    """

    parts: Mapping[str, tuple[Any, ...]]
    names: tuple[str, ...]
    single: bool

    def label(self, part: str, number: int) -> str:
        """Return the words for one input of a part."""
        if self.names:
            return f"{part} inputs '{self.names[number]}'"
        several = len(next(iter(self.parts.values()))) > 1
        return f"{part} inputs {number}" if several else f"{part} inputs"


def taken_apart(inputs: Mapping[str, object]) -> Structure:
    """Take the inputs of each part apart.

    Args:
        inputs: of the parts, by their names.

    Raises:
        BadData: the parts have different inputs, or sequences differ in more than their lengths.
    """
    first_part, first = next(iter(inputs.items()))
    names = _names(first)
    parts = {}
    for part, value in inputs.items():
        if _kind(value) != _kind(first) or set(_names(value)) != set(names):
            raise BadData(
                f"the {part} part has {_said(value)}, and the {first_part} part {_said(first)}; all parts "
                "need the same inputs"
            )
        if isinstance(value, Mapping):
            found = [value[name] for name in names]
        else:
            found = [*value] if isinstance(value, tuple) and _is_several(value) else [value]
        parts[part] = [_sequences(one, f"{part} inputs") for one in found]
    numbers = {part: len(found) for part, found in parts.items()}
    if len(set(numbers.values())) > 1:
        raise BadData(
            f"the parts have different numbers of inputs: {numbers}; all parts need the same inputs"
        )
    for number in range(numbers[first_part]):
        if any(isinstance(found[number], Sequences) for found in parts.values()):
            for part, found in parts.items():
                found[number] = _as_sequences(found[number], f"{part} inputs")
    single = _kind(first) == "one" and not isinstance(parts[first_part][0], Sequences)
    kept = {
        part: tuple(one.column if isinstance(one, Sequences) else one for one in found)
        for part, found in parts.items()
    }
    return Structure(kept, names, single)


def sequences(items: Sequence[object], what: str) -> Sequences:
    """Return sequences: each is an array, a tensor or a list.

    Raises:
        BadData: they differ in more than their lengths.
    """
    arrays = [as_array(one, what) for one in items]
    lengths = np.array([len(one) if one.ndim else -1 for one in arrays], dtype=np.int64)
    # An empty list has neither a shape nor a type.
    template = next((one for one in arrays if one.ndim and len(one)), arrays[0])
    for number, one in enumerate(arrays):
        if one.ndim == 0 or (len(one) and one.shape[1:] != template.shape[1:]):
            raise BadData(
                f"the {what} have the shape {one.shape} in sample {number} and {template.shape} in the "
                "first; sequences may differ in their first size alone"
            )
    values = np.concatenate([one for one in arrays if len(one)] or [template])
    return Sequences(values, lengths)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, Mapping):
        return ()
    if not value:
        raise BadData("the inputs are an empty dict; give at least one input")
    wrong = next((name for name in value if not (isinstance(name, str) and name.isidentifier())), None)
    if wrong is not None:
        raise BadData(
            f"an input is called {wrong!r}, and a model takes inputs by their names as keywords; give it a "
            "name of letters, digits and _"
        )
    if LENGTHS in value:
        raise BadData(
            f"an input is called '{LENGTHS}': a model gets the lengths of sequences by this name; give the "
            "sequences unpadded as lists, whose lengths are known, or call the input otherwise"
        )
    return tuple(value)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "named"
    return "several" if _is_several(value) else "one"


def _is_several(value: object) -> bool:
    """Return whether a value is a tuple of inputs; a tuple of numbers or of tuples is an array."""
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(one, np.ndarray | Tensor | StoredRows | Sequences | list) for one in value)
    )


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return f"the inputs {', '.join(map(str, value))}"
    return f"{len(value)} inputs" if _is_several(value) and isinstance(value, tuple) else "one input"


def _sequences(value: object, what: str) -> object:
    """Return sequences of unequal length as such, and anything else as it is."""
    if isinstance(value, Tensor) and value.is_nested:
        return sequences(value.unbind(), what)
    objects = isinstance(value, np.ndarray) and value.dtype == object
    if not isinstance(value, list | np.ndarray) or not (objects or isinstance(value, list)):
        return value
    items: list[Any] = [*value]
    if not items or not all(isinstance(one, list | tuple | np.ndarray | Tensor) for one in items):
        return value
    if any(isinstance(one, np.ndarray | Tensor) and one.ndim == 0 for one in items):
        return value
    unequal = len({len(one) for one in items}) > 1
    return sequences(items, what) if unequal or isinstance(value, np.ndarray) else value


def _as_sequences(value: object, what: str) -> Sequences:
    if isinstance(value, Sequences):
        return value
    array: Array = value[:] if isinstance(value, StoredRows) else as_array(value, what)
    return sequences([*array], what)
