"""Samples whose values have names, as in JSON, gathered into inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tutti.data.arrays import as_floats
from tutti.data.contents import Contents
from tutti.data.pile import Pile
from tutti.data.rows import Array, chosen
from tutti.data.tables import Choice, Column, choose, one_column, refuse_long_texts, targets_of
from tutti.errors import BadData
from tutti.records.npz import refuse_larger_than_memory
from tutti.records.untrusted import printable

_BLOCK: Final = 4096
"""Samples that are kept as they came before they become arrays."""

_BLOCK_VALUES: Final = 1 << 18
"""Values that are kept as they came, likewise."""

_NUMBERS: Final = frozenset({int, float, bool})
_VALUES: Final = _NUMBERS | {type(None), list}


class NamedSamples:
    """Samples of named values, added one by one.

    Their inputs are several numbers, or one list of numbers, which may hold lists and be of any length; NaN
    stands for those that are missing.

    Args:
        path: the file that has them.
        target: the name of the target, or several; None: it tells itself by its name.
        columns: those of the inputs; None: all others.
        labelled: whether there must be targets.
    """

    def __init__(self, path: Path, target: object, columns: object, labelled: bool = True) -> None:
        self._path, self._target, self._columns, self._labelled = path, target, columns, labelled
        self._names: tuple[str, ...] = ()
        self._choice = Choice((), ())
        self._listed = False
        self._waiting: list[tuple[str, Mapping[str, object]]] = []
        self._values = 0
        self._inputs = Pile(path)
        self._sequences: list[Array] = []
        self._nbytes = 0
        self._goals: list[list[Column]] = []

    def add(self, where: str, sample: Mapping[str, object]) -> None:
        """Add a sample.

        Args:
            where: its place in the file, such as "row 3", for messages.
            sample: numbers, texts, lists and arrays by name; None: missing.

        Raises:
            BadData: it has other names than the first, or values that are no numbers where they are due.
        """
        if not self._names:
            self._names = tuple(sample)
            self._choice = choose(self._names, self._target, self._columns, str(self._path), self._labelled)
        if self._columns is None and (strange := sample.keys() - set(self._names)):
            raise BadData(
                f"{self._path} has a value '{printable(min(strange)[:80])}' in {where}, which the first "
                "sample has not; give all samples the same, or choose some by --data.columns A,B,..."
            )
        self._waiting.append((where, sample))
        self._values += sum(_size(sample.get(name)) for name in self._used)
        if len(self._waiting) >= _BLOCK or self._values >= _BLOCK_VALUES:
            self._gather()

    def contents(self, name: str, missing: str) -> Contents[object]:
        """Return all samples.

        Args:
            name: of the data set.
            missing: "drop" leaves out samples without a target.

        Raises:
            BadData: there is none, or a target is missing.
        """
        if self._waiting:
            self._gather()
        if not (len(self._inputs) or self._sequences):
            raise BadData(f"{self._path} has no samples; give at least two")
        inputs = self._of_unequal_length() if self._sequences else self._inputs.rows(self._dtype)
        names = () if self._listed else tuple(self._names[at] for at in self._choice.inputs)
        if not self._labelled:
            return Contents(name, {"train": (inputs, None)}, columns=names)
        columns = [one_column(several, str(self._path)) for several in zip(*self._goals, strict=True)]
        targets, kept = targets_of(columns, missing, str(self._path))
        numbers = np.flatnonzero(kept)
        some = chosen(inputs, numbers) if inputs.dtype != object else inputs[numbers]
        return Contents(name, {"train": (some, targets)}, columns=names)

    @property
    def _used(self) -> tuple[str, ...]:
        return tuple(self._names[at] for at in (*self._choice.inputs, *self._choice.targets))

    @property
    def _dtype(self) -> np.dtype[Any]:
        """The type of all inputs: whole numbers become floats where another block has such."""
        kinds = self._inputs.dtypes
        whole = {kind for kind in kinds if kind.kind in "biu"}
        return (kinds - whole or whole).pop() if len(whole) < 2 else np.result_type(*kinds)

    def _gather(self) -> None:
        """Turn the samples that wait into arrays."""
        places, samples = zip(*self._waiting, strict=True)
        inputs = [self._names[at] for at in self._choice.inputs]
        if not (len(self._inputs) or self._sequences):
            self._listed = len(inputs) == 1 and any(_is_list(one.get(inputs[0])) for one in samples)
        if self._listed:
            self._add_lists(places, inputs[0], [one.get(inputs[0]) for one in samples])
        else:
            values = [one.get(name) for one in samples for name in inputs]
            self._inputs.add(self._numbers(places, inputs, values).reshape(len(samples), -1))
        goals = [self._names[at] for at in self._choice.targets]
        self._goals.append([self._goal(places, name, [one.get(name) for one in samples]) for name in goals])
        self._waiting, self._values = [], 0

    def _numbers(self, places: Sequence[str], names: Sequence[str], values: list[object]) -> Array:
        if not {*map(type, values)} <= _NUMBERS:
            for at, value in enumerate(values):
                if value is not None and type(value) not in _NUMBERS:
                    row, column = divmod(at, len(names))
                    raise self._no_number(places[row], names[column], value)
            values = [float("nan") if value is None else value for value in values]
        try:
            return as_floats(np.array(values, np.float64))
        except OverflowError as error:
            raise BadData(f"{self._path} has a number that is too large near {places[0]}: {error}") from error

    def _add_lists(self, places: Sequence[str], name: str, values: list[object]) -> None:
        """Add lists of numbers; from the first of another length on, all are sequences."""
        arrays = self._arrays(places, name, values)
        shape = self._sequences[0].shape if self._sequences else arrays[0].shape
        if len(self._inputs):
            shape = self._inputs.shape
        if not self._sequences and all(array.shape == shape for array in arrays):
            self._inputs.add(np.stack(arrays))
            return
        for at, (place, array) in enumerate(zip(places, arrays, strict=True)):
            if array.shape == (0,):
                arrays[at] = np.empty((0, *shape[1:]), array.dtype)
            elif array.ndim != len(shape) or not shape or array.shape[1:] != shape[1:]:
                raise self._unequal(place, name, array.shape, shape)
        if len(self._inputs):
            self._sequences = list(self._inputs.rows(self._dtype)[:])
            self._inputs = Pile(self._path)
        self._sequences += arrays
        self._nbytes += sum(array.nbytes for array in arrays)
        refuse_larger_than_memory(self._path, self._nbytes)

    def _of_unequal_length(self) -> Array:
        """Return the sequences, of one type, as an array of arrays."""
        whole = all(array.dtype.kind in "biu" for array in self._sequences if array.size)
        found: Array = np.empty(len(self._sequences), object)
        for at, array in enumerate(self._sequences):
            found[at] = array.astype(np.int64) if whole else as_floats(array)
        return found

    def _lists(self, places: Sequence[str], name: str, values: list[object]) -> Array:
        """Return lists of numbers, or arrays, as one array."""
        arrays = self._arrays(places, name, values)
        for place, array in zip(places, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise self._unequal(place, name, array.shape, arrays[0].shape)
        return np.stack(arrays)

    def _arrays(self, places: Sequence[str], name: str, values: list[object]) -> list[Array]:
        for place, value in zip(places, values, strict=True):
            if not _is_list(value):
                raise self._no_list(place, name, value)
        return [self._list(place, name, value) for place, value in zip(places, values, strict=True)]

    def _list(self, place: str, name: str, value: object) -> Array:
        """Return a list of numbers as an array; floats have the type in which they are kept."""
        if isinstance(value, np.ndarray):
            return value
        for one in _leaves(value):
            if not {*map(type, one)} <= _VALUES:
                raise self._no_number(place, name, next(x for x in one if type(x) not in _VALUES))
        try:
            found = np.array(value)
            if found.dtype == object:
                found = found.astype(np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise BadData(
                f"{self._path} has no regular list of numbers in {place}, '{name}': {_short(value)}; all "
                "need numbers, and lists of one level one length"
            ) from error
        if found.dtype.kind == "u":
            raise BadData(
                f"{self._path} has a number that is too large in {place}, '{name}': {_short(value)}"
            )
        return as_floats(found) if found.dtype.kind == "f" else found.astype(np.int64)

    def _goal(self, places: Sequence[str], name: str, values: list[object]) -> Column:
        absent = np.array([value is None for value in values], dtype=bool)
        there = [value for value in values if value is not None]
        kinds = {*map(type, there)}
        if kinds <= _NUMBERS:
            try:
                whole = np.int64 if kinds <= {int, bool} else np.float64
                return Column(name, np.array([value or 0 for value in values], whole), absent)
            except OverflowError as error:
                raise BadData(
                    f"{self._path} has a number that is too large in the target '{name}' near {places[0]}"
                ) from error
        if kinds == {str}:
            refuse_long_texts(map(str, there), name, str(self._path))
            texts = ["" if value is None else printable(str(value)) for value in values]
            return Column(name, np.array(texts, dtype=str), absent)
        if all(map(_is_list, there)):
            first = there[0]
            return Column(
                name, self._lists(places, name, [first if one is None else one for one in values]), absent
            )
        kind = type(there[0])
        at = next(at for at, value in enumerate(values) if value is not None and type(value) is not kind)
        raise BadData(
            f"{self._path} has {_short(values[at])} in {places[at]}, target '{name}', and "
            f"{_short(there[0])} before; give numbers, or texts, or lists of numbers in all samples"
        )

    def _no_number(self, place: str, name: str, value: object) -> BadData:
        words: dict[object, str] = {str: "a text", list: "a list", dict: "an object"}
        found = words.get(type(value), type(value).__name__)
        advice = (
            f"give that one alone by --data.columns {name}"
            if _is_list(value)
            else "mend it, or choose the columns of numbers by --data.columns A,B,..."
        )
        return BadData(
            f"{self._path} has {found} where a number is due: {place}, column '{name}' has "
            f"{_short(value)}; {advice}"
        )

    def _no_list(self, place: str, name: str, value: object) -> BadData:
        found = "nothing" if value is None else _short(value)
        return BadData(
            f"{self._path} has {found} in {place}, column '{name}', where others have lists or files; mend "
            "it or leave it out"
        )

    def _unequal(self, place: str, name: str, shape: tuple[int, ...], first: tuple[int, ...]) -> BadData:
        return BadData(
            f"{self._path} has lists of several lengths in '{name}': {_shape(first)}, and {_shape(shape)} "
            f"in {place}; give all one length"
        )


def _is_list(value: object) -> bool:
    return isinstance(value, list | np.ndarray)


def _leaves(value: object) -> Iterator[list[object]]:
    """The lists in a list that hold something else than lists."""
    assert isinstance(value, list), "it has been looked at"
    inner = [one for one in value if isinstance(one, list)]
    if len(inner) < len(value):
        yield value
    for one in inner:
        yield from _leaves(one)


def _size(value: object) -> int:
    """About how many numbers a value has."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, list) and value:
        return len(value) * _size(value[0])
    return 1


def _short(value: object) -> str:
    text = repr(value)
    return printable(text if len(text) <= 60 else text[:57] + "...")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
