"""Samples whose values have names, as in JSON, gathered into inputs and targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.arrays import as_floats
from tutti.data.contents import Contents
from tutti.data.pile import Pile
from tutti.data.rows import Array, Indices, Rows, chosen
from tutti.data.tables import (
    Choice,
    Column,
    choose,
    groups_of,
    one_column,
    refuse_long_texts,
    targets_of,
)
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
    stands for those that are missing. Where several are asked for and one is a list, each is an input by
    itself, by its name: numbers are of shape (samples,) then, and whole numbers stay whole.

    Args:
        path: the file that has them.
        target: the name of the target, or several; None: it tells itself by its name.
        columns: those of the inputs; None: all others.
        labelled: whether there must be targets.
        group: the name by which samples are grouped, which is no input.
    """

    def __init__(
        self, path: Path, target: object, columns: object, labelled: bool = True, group: object = None
    ) -> None:
        self._path, self._target, self._columns, self._labelled = path, target, columns, labelled
        self._group = group
        self._names: tuple[str, ...] = ()
        self._choice = Choice((), ())
        self._named: dict[str, _NamedInput] = {}
        self._waiting: list[tuple[str, Mapping[str, object]]] = []
        self._values = 0
        self._table = Pile(path)
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
            self._choice = choose(
                self._names, self._target, self._columns, str(self._path), self._labelled, self._group
            )
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
        if not self._goals:
            raise BadData(f"{self._path} has no samples; give at least two")
        names = () if self._named else tuple(self._names[at] for at in self._choice.inputs)
        if not self._labelled:
            return Contents(name, {"train": (self._inputs_of(None), None)}, columns=names)
        columns = [one_column(several, str(self._path)) for several in zip(*self._goals, strict=True)]
        grouped = columns.pop() if self._choice.group is not None else None
        targets, kept = targets_of(columns, missing, str(self._path))
        groups = None if grouped is None else groups_of(grouped, kept, str(self._path))
        inputs = self._inputs_of(np.flatnonzero(kept))
        return Contents(name, {"train": (inputs, targets)}, columns=names, groups=groups)

    def _inputs_of(self, wanted: Indices | None) -> object:
        """Return the inputs of some samples, by their numbers; None: of all."""
        if not self._named:
            rows = self._table.rows(_common(self._table))
            return rows if wanted is None else chosen(rows, wanted)
        found = {name: one.whole(wanted) for name, one in self._named.items()}
        return found if len(found) > 1 else next(iter(found.values()))

    @property
    def _used(self) -> tuple[str, ...]:
        return tuple(self._names[at] for at in (*self._choice.inputs, *self._choice.targets))

    def _gather(self) -> None:
        """Turn the samples that wait into arrays."""
        places, samples = zip(*self._waiting, strict=True)
        inputs = [self._names[at] for at in self._choice.inputs]
        if not self._goals:
            self._named = self._inputs_by_name(inputs, samples)
        for name, one in self._named.items():
            one.add(places, [sample.get(name) for sample in samples])
        if not self._named:
            values = [one.get(name) for one in samples for name in inputs]
            numbers = as_floats(_numbers(self._path, places, inputs, values))
            self._table.add(numbers.reshape(len(samples), -1))
        choice = self._choice
        goals = [self._names[at] for at in choice.targets]
        goals += [] if choice.group is None else [self._names[choice.group]]
        self._goals.append(
            [_goal(self._path, places, name, [one.get(name) for one in samples]) for name in goals]
        )
        self._waiting, self._values = [], 0

    def _inputs_by_name(
        self, names: Sequence[str], samples: Sequence[Mapping[str, object]]
    ) -> dict[str, _NamedInput]:
        """Return the inputs, if one of them is a list; else none, as they are columns of a table."""
        lists = [any(_is_list(one.get(name)) for one in samples) for name in names]
        if not any(lists):
            return {}
        kinds = [_ListInput if one else _NumberInput for one in lists]
        return {name: kind(self._path, name) for name, kind in zip(names, kinds, strict=True)}


class _NamedInput(ABC):
    """One of the inputs by name, added in blocks.

    Args:
        path: the file that has it.
        name: of the input.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name, self._pile = path, name, Pile(path)

    @abstractmethod
    def add(self, places: Sequence[str], values: list[object]) -> None:
        """Add those of some samples, with the places of these."""

    def whole(self, wanted: Indices | None) -> Rows:
        """Return those of some samples, by their numbers; None: of all."""
        rows = self._pile.rows(_common(self._pile))
        return rows if wanted is None else chosen(rows, wanted)


class _NumberInput(_NamedInput):
    """A number of each sample."""

    @override
    def add(self, places: Sequence[str], values: list[object]) -> None:
        if {*map(type, values)} <= {int, bool}:
            self._pile.add(_numbers(self._path, places, [self._name], values, np.int64))
        else:
            self._pile.add(as_floats(_numbers(self._path, places, [self._name], values)))


class _ListInput(_NamedInput):
    """A list of each sample; from the first of another length on, all are sequences."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        self._sequences: list[Array] = []
        self._nbytes = 0

    @override
    def add(self, places: Sequence[str], values: list[object]) -> None:
        arrays = _arrays(self._path, places, self._name, values)
        shape = self._sequences[0].shape if self._sequences else arrays[0].shape
        if len(self._pile):
            shape = self._pile.shape
        if not self._sequences and all(array.shape == shape for array in arrays):
            self._pile.add(np.stack(arrays))
            return
        for at, (place, array) in enumerate(zip(places, arrays, strict=True)):
            if array.shape == (0,):
                arrays[at] = np.empty((0, *shape[1:]), array.dtype)
            elif array.ndim != len(shape) or not shape or array.shape[1:] != shape[1:]:
                raise _unequal(self._path, place, self._name, array.shape, shape)
        if len(self._pile):
            self._sequences = list(self._pile.rows(_common(self._pile))[:])
            self._pile = Pile(self._path)
        self._sequences += arrays
        self._nbytes += sum(array.nbytes for array in arrays)
        refuse_larger_than_memory(self._path, self._nbytes)

    @override
    def whole(self, wanted: Indices | None) -> Rows:
        if not self._sequences:
            return super().whole(wanted)
        whole = all(array.dtype.kind in "biu" for array in self._sequences if array.size)
        found: Array = np.empty(len(self._sequences), object)
        for at, array in enumerate(self._sequences):
            found[at] = array.astype(np.int64) if whole else as_floats(array)
        return found if wanted is None else found[wanted]


def _goal(path: Path, places: Sequence[str], name: str, values: list[object]) -> Column:
    """Return the values of some samples that are no inputs: numbers, texts or lists of numbers."""
    absent = np.array([value is None for value in values], dtype=bool)
    there = [value for value in values if value is not None]
    kinds = {*map(type, there)}
    if kinds <= _NUMBERS:
        try:
            whole = np.int64 if kinds <= {int, bool} else np.float64
            return Column(name, np.array([value or 0 for value in values], whole), absent)
        except OverflowError as error:
            raise BadData(
                f"{path} has a number that is too large in the target '{name}' near {places[0]}"
            ) from error
    if kinds == {str}:
        refuse_long_texts(map(str, there), name, str(path))
        texts = ["" if value is None else printable(str(value)) for value in values]
        return Column(name, np.array(texts, dtype=str), absent)
    if all(map(_is_list, there)):
        first = there[0]
        return Column(
            name,
            _stacked(path, places, name, [first if one is None else one for one in values]),
            absent,
        )
    kind = type(there[0])
    at = next(at for at, value in enumerate(values) if value is not None and type(value) is not kind)
    raise BadData(
        f"{path} has {_short(values[at])} in {places[at]}, target '{name}', and "
        f"{_short(there[0])} before; give numbers, or texts, or lists of numbers in all samples"
    )


def _common(pile: Pile) -> np.dtype[Any]:
    """Return the type of all samples: whole numbers become floats where another block has such."""
    kinds = pile.dtypes
    whole = {kind for kind in kinds if kind.kind in "biu"}
    return (kinds - whole or whole).pop() if len(whole) < 2 else np.result_type(*kinds)


def _numbers(
    path: Path, places: Sequence[str], names: Sequence[str], values: list[object], kind: type = np.float64
) -> Array:
    """Return the numbers of some samples, one sample after the other."""
    if not {*map(type, values)} <= _NUMBERS:
        for at, value in enumerate(values):
            if value is not None and type(value) not in _NUMBERS:
                row, column = divmod(at, len(names))
                raise _no_number(path, places[row], names[column], value)
        values = [float("nan") if value is None else value for value in values]
    try:
        return np.array(values, kind)
    except OverflowError as error:
        raise BadData(f"{path} has a number that is too large near {places[0]}: {error}") from error


def _stacked(path: Path, places: Sequence[str], name: str, values: list[object]) -> Array:
    """Return lists of numbers, or arrays, as one array."""
    arrays = _arrays(path, places, name, values)
    for place, array in zip(places, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise _unequal(path, place, name, array.shape, arrays[0].shape)
    return np.stack(arrays)


def _arrays(path: Path, places: Sequence[str], name: str, values: list[object]) -> list[Array]:
    for place, value in zip(places, values, strict=True):
        if not _is_list(value):
            raise _no_list(path, place, name, value)
    return [_array(path, place, name, value) for place, value in zip(places, values, strict=True)]


def _array(path: Path, place: str, name: str, value: object) -> Array:
    """Return a list of numbers as an array; floats have the type in which they are kept."""
    if isinstance(value, np.ndarray):
        return value
    for one in _leaves(value):
        if not {*map(type, one)} <= _VALUES:
            raise _no_number(path, place, name, next(x for x in one if type(x) not in _VALUES))
    try:
        found = np.array(value)
        if found.dtype == object:
            found = found.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadData(
            f"{path} has no regular list of numbers in {place}, '{name}': {_short(value)}; all "
            "need numbers, and lists of one level one length"
        ) from error
    if found.dtype.kind == "u":
        raise BadData(f"{path} has a number that is too large in {place}, '{name}': {_short(value)}")
    return as_floats(found) if found.dtype.kind == "f" else found.astype(np.int64)


def _no_number(path: Path, place: str, name: str, value: object) -> BadData:
    words: dict[object, str] = {str: "a text", list: "a list", dict: "an object"}
    found = words.get(type(value), type(value).__name__)
    return BadData(
        f"{path} has {found} where a number is due: {place}, column '{name}' has {_short(value)}; mend it, "
        "or choose the columns of numbers by --data.columns A,B,..."
    )


def _no_list(path: Path, place: str, name: str, value: object) -> BadData:
    found = "nothing" if value is None else _short(value)
    return BadData(
        f"{path} has {found} in {place}, column '{name}', where others have lists or files; mend it or leave "
        "it out"
    )


def _unequal(path: Path, place: str, name: str, shape: tuple[int, ...], first: tuple[int, ...]) -> BadData:
    return BadData(
        f"{path} has lists of several lengths in '{name}': {_shape(first)}, and {_shape(shape)} in {place}; "
        "give all one length"
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
