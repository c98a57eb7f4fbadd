"""Objects that hold a data set, taken apart into the inputs and targets of each part."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import TypeVar

from tutti.data.columns import LENGTHS, Column, Columns, Stored
from tutti.data.items import read_items
from tutti.data.rows import Array, Indices, Rows, StoredRows
from tutti.data.structure import sequence_column, values_and_lengths
from tutti.data.tables import TARGETS
from tutti.errors import BadData, BadOption
from tutti.records.json_lines import parse_record, to_json
from tutti.records.preparation import Table

PARTS = {
    "train": "train",
    "test": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
"""The parts by their names in keys."""

_INPUTS = ("x", "inputs", "images", "data", "features")

_WEIGHTS = ("w", "weight", "sample_weight")

_SLOTS = {
    key: (PARTS.get(part, "train"), kind)
    for kind, words in (("inputs", _INPUTS), ("targets", TARGETS), ("weights", _WEIGHTS))
    for word in words
    for part in ("", *PARTS)
    for key in ((f"{word}_{part}", f"{part}_{word}") if part else (word,))
}
"""The part and the kind that a key such as 'x_train', 'test_labels' or 'x' stands for."""

_NAMES = ("label_names", "class_names", "target_names")

_LENGTHS: Final = f".{LENGTHS}"
"""The end of the keys of the lengths of sequences."""

_CLASSES: Final = "classes"
_COLUMNS: Final = "column_names"
_INPUT_NAMES: Final = "input_names"
_TABLE: Final = "stored_table"
EXTRA_KEYS: Final = frozenset({*_NAMES, _CLASSES, _COLUMNS, _INPUT_NAMES, _TABLE})
"""Keys beside those of inputs and targets: the number of classes, names, and a `Table` as JSON."""

_DATA_SETS = Dataset, DataLoader
"""Objects to be read item by item; loaders are refused."""

_EXPECTED = (
    "give (x, y), ((x, y), (x_test, y_test)), a torch data set, a pair of them, or a dict with "
    "'x_train', 'y_train', 'x_test', 'y_test'; several inputs are a dict or a tuple in place of x"
)


T = TypeVar("T")
Y = TypeVar("Y", default=T)


@dataclass(frozen=True)
class Contents(Generic[T, Y]):
    """A data set taken apart: of any objects after reading, of arrays once it is checked."""

    name: str  # for people to read
    # inputs and targets of "train", and perhaps of "validation" and "test"; targets may be None if they were
    # not requested
    parts: Mapping[str, tuple[T, Y]]
    # their number, if the data give it; 0 in unchecked data: the targets are amounts
    classes: int | None = None
    # the names of the classes, if the data have them: texts, whole numbers or booleans; of flags, which are
    # no classes, their names
    labels: tuple[Any, ...] = ()
    columns: tuple[str, ...] = ()  # the names of the inputs, if each is one number of a table
    filled: bool = False  # inputs that are NaN are missing, and replaced by the mean of the training samples
    # of the training samples, of shape (samples,), if a column for them was chosen
    groups: Array | None = None
    buffer_bytes: int = 0  # the memory for inputs that stay in their files; 0: all are read into memory
    targets: tuple[str, ...] = ()  # the names of the target columns, if they have some
    # of the samples of the parts that have some, of shape (samples,)
    weights: Mapping[str, object] = field(default_factory=dict)
    table: Table | None = None  # the columns of the inputs, if these are a table to prepare
    # the rows of parts, ascending, that are not among the samples
    left_out: Mapping[str, Indices] = field(default_factory=dict)


ReadData: TypeAlias = Contents[Stored[Rows], Array]
"""A data set as it is once it is checked."""


def slot_of(name: str) -> tuple[str, str] | None:
    """Return the part and the kind (inputs, targets or weights) of a name such as 'x_train'.

    One of several inputs has its own name behind that: 'x_train.image'.
    """
    whole, dot, _ = name.partition(".")
    slot = _SLOTS.get(whole.lower())
    return None if slot is not None and dot and slot[1] != "inputs" else slot


def contents_of(value: object, name: str, what: str, labelled: bool = True) -> Contents[object]:
    """Take an object apart: (x, y), ((x, y), (x_test, y_test)), a torch data set, a pair of them, or a dict.

    Without `labelled` an array or a tensor will do. `what` names the object in messages.
    """
    if isinstance(value, Mapping):
        return from_keys(value, name, what, labelled)
    if not labelled and isinstance(value, np.ndarray | Tensor):
        return Contents(name, {"train": (value, None)})
    given = [*value] if isinstance(value, tuple | list) and len(value) == 2 else []
    sets = [value] if _has_items(value) else given
    if sets and all(map(_has_items, sets)):
        by_part = dict(zip(("train", "test"), sets, strict=False))
        labels = {part: _dataset_labels(one) for part, one in by_part.items()}
        if "test" in labels and labels["test"] not in ((), labels["train"]):
            raise BadData(
                f"the test part of {what} has other class names than the training part, so that its numbers "
                "stand for other classes; number the classes alike, or give them as texts"
            )
        return Contents(
            name, {part: read_items(one, part) for part, one in by_part.items()}, labels=labels["train"]
        )
    if given:
        first, second = given
        if not (isinstance(first, tuple) and isinstance(second, tuple)):
            return Contents(name, {"train": (first, second)})
        if len(first) == len(second) == 2:
            return Contents(name, {"train": first, "test": second})
    kind = type(value).__name__ + (f" of {len(value)}" if isinstance(value, Sequence) else "")
    raise BadData(f"{what} is a {kind}; {_EXPECTED}")


def with_weights(value: object, weights: object) -> dict[str, object]:
    """Return arrays by keys, with a weight for each training sample; BadOption for other data."""
    if isinstance(value, Mapping):
        return {**value, "w_train": weights}
    if not isinstance(value, tuple | list) or any(map(_has_items, (value, *value))):
        raise BadOption(
            "sample_weight is for arrays; of a table name their column: data_options={'weight': 'NAME'}"
        )
    parts = contents_of(value, "arrays", "the data").parts
    keys = {f"{key}_{part}": one for part, both in parts.items() for key, one in zip("xy", both, strict=True)}
    return {**keys, "w_train": weights}


def from_keys(values: Mapping[str, object], name: str, what: str, labelled: bool = True) -> Contents[object]:
    """Take a dict or an NPZ file apart by its keys: a part and 'x' or 'y', or one of their synonyms."""
    listed = ", ".join(map(str, values)) or "none"
    values = _several_together(values, what)
    slots: dict[tuple[str, str], str] = {}
    for key in values:
        slot = slot_of(str(key))
        if slot is None:
            continue
        if slot in slots:
            raise BadData(
                f"the keys '{slots[slot]}' and '{key}' of {what} stand for the same; keep one of them"
            )
        slots[slot] = key
    for key in [key for key in values if slot_of(str(key)) is None and key not in EXTRA_KEYS]:
        near = difflib.get_close_matches(str(key).lower(), [*_SLOTS, *EXTRA_KEYS], n=1, cutoff=0.8)
        if near and near[0] not in values and slot_of(near[0]) not in slots:
            raise BadData(f"{what} has the key '{key}'; did you mean '{near[0]}'? Its keys are {listed}")
    explained = (
        f"keys found: {listed}; expected 'x_train' and 'y_train' (also 'x_test' and 'y_test', 'x_val' and "
        f"'y_val'), or 'x' and 'y'"
    )
    parts: dict[str, tuple[object, object]] = {}
    if not labelled:
        parts = {part: (values[key], None) for (part, kind), key in slots.items() if kind == "inputs"}
    if not parts:
        pairs = pair_up(slots, ("inputs", "targets"), what, explained)
        parts = {part: (values[x], values[y]) for part, (x, y) in pairs.items()}
    names = _labels(next((values[key] for key in _NAMES if key in values), ()))
    columns = _texts(values.get(_COLUMNS, ()))
    weights = {part: values[key] for (part, kind), key in slots.items() if kind == "weights" and labelled}
    table = parse_record(str(values[_TABLE]), Table) if _TABLE in values else None
    classes = _whole(values.get(_CLASSES))
    return Contents(name, parts, classes, names, columns, table=table, weights=weights)


def _several_together(values: Mapping[str, object], what: str) -> dict[str, object]:
    """Return the values with 'x.image' and 'x.age' as one 'x', by name or by position."""
    found: dict[str, object] = {}
    several: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        whole, dot, name = str(key).partition(".")
        if dot and slot_of(str(key)) is not None:
            if whole not in values:  # else it is something else
                several.setdefault(whole, {})[name] = value
        else:
            found[key] = value
    for whole, inputs in several.items():
        for name in [name for name in inputs if name.endswith(_LENGTHS)]:
            of = name.removesuffix(_LENGTHS)
            inputs[of] = _sequences(inputs.get(of), inputs.pop(name), f"'{whole}.{of}' of {what}")
        order = _texts(values.get(_INPUT_NAMES, ()))
        if {*order} == {*inputs}:
            inputs = {name: inputs[name] for name in order}
        numbered = all(name.isdecimal() for name in inputs)
        found[whole] = tuple(inputs[name] for name in sorted(inputs, key=int)) if numbered else inputs
    return found


def _sequences(values: object, lengths: object, what: str) -> Column[Rows]:
    counts = np.asarray(lengths[:] if isinstance(lengths, np.ndarray | StoredRows) else lengths)
    if not isinstance(values, np.ndarray | StoredRows) or counts.sum() != len(values):
        raise BadData(f"{what} has lengths of other sequences; write both by 'tutti data convert'")
    return sequence_column(values, counts.astype(np.int64))


def to_keys(contents: ReadData) -> dict[str, Rows]:
    """Return the arrays of a data set by keys, for `from_keys`.

    Several inputs are 'x_train.image' and 'x_train.age', or 'x_train.0' and 'x_train.1'; for sequences,
    'x_train.tokens' has all values, and 'x_train.tokens.lengths' the lengths.
    """
    words = {part: word for word, part in reversed(PARTS.items())}
    found: dict[str, Rows] = {}
    for part, (inputs, targets) in contents.parts.items():
        key = f"x_{words[part]}"
        if isinstance(inputs, Columns):
            names = inputs.names or [str(at) for at in range(len(inputs.columns))]
            for name, column in zip(names, inputs.columns, strict=True):
                if column.values is None:
                    found[f"{key}.{name}"] = column.rows
                else:
                    values, lengths = values_and_lengths(column)
                    found |= {f"{key}.{name}": values, f"{key}.{name}{_LENGTHS}": lengths}
        else:
            found[key] = inputs
        found[f"y_{words[part]}"] = targets
        if part in contents.weights:
            found[f"w_{words[part]}"] = np.asarray(contents.weights[part])
    first, _ = contents.parts["train"]
    if isinstance(first, Columns) and first.names:
        found[_INPUT_NAMES] = np.array(first.names)
    found[_CLASSES] = np.array(contents.classes or 0)
    if contents.labels:
        found[_NAMES[0]] = np.array(contents.labels)
    if contents.columns:
        found[_COLUMNS] = np.array(contents.columns)
    if contents.table is not None:
        found[_TABLE] = np.array(to_json(contents.table))
    return found


def pair_up(
    found: Mapping[tuple[str, str], T], kinds: tuple[str, str], what: str, explained: str
) -> dict[str, tuple[T, T]]:
    """Pair the inputs and the targets of each part; refuse one without the other."""
    pairs = {}
    for part in ("train", "validation", "test"):
        missing = [kind for kind in kinds if (part, kind) not in found]
        if not missing:
            pairs[part] = found[part, kinds[0]], found[part, kinds[1]]
        elif len(missing) == 1 or part == "train":
            raise BadData(f"{what} lacks the {part} {' and '.join(missing)}; {explained}")
    return pairs


def _has_items(value: object) -> bool:
    """Return whether a value is read item by item: a torch data set, or a list of dicts."""
    dicts = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    return dicts or isinstance(value, _DATA_SETS)


def _texts(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        return ()
    return tuple(str(name) for name in names)


def _labels(names: object) -> tuple[Any, ...]:
    """Return the names of classes, which may be whole numbers or booleans."""
    if isinstance(names, np.ndarray | StoredRows) and names.dtype.kind in "biu":
        return tuple(np.asarray(names[:]).tolist())
    return _texts(names)


def _whole(value: object) -> int | None:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int) else None


def _dataset_labels(dataset: object) -> tuple[str, ...]:
    """Return the names of the classes if the data set has them like torchvision's, in `classes`."""
    names = getattr(dataset, "classes", ())
    return _texts(names) if isinstance(names, tuple | list) else ()
