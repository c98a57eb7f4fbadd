"""Objects that hold a data set, taken apart into the inputs and targets of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tutti.data.items import is_dataset, read_items
from tutti.errors import BadData

PARTS = {
    "train": "train",
    "test": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
"""The parts by their names in keys."""

_INPUTS = ("x", "inputs", "images", "data", "features")
_TARGETS = ("y", "targets", "labels", "target")
_NAMES = ("label_names", "class_names", "target_names")

_EXPECTED = (
    "give (x, y), ((x, y), (x_test, y_test)), a torch data set, a pair of them, or a dict with "
    "'x_train', 'y_train', 'x_test', 'y_test'"
)


@dataclass(frozen=True)
class Contents:
    """A data set taken apart, not yet checked.

    Attributes:
        name: for people to read.
        parts: inputs and targets of "train", and perhaps of "validation" and "test".
        classes: their number, where the data say so.
        labels: the classes' names, where the data have them.
    """

    name: str
    parts: dict[str, tuple[object, object]]
    classes: int | None = None
    labels: tuple[str, ...] = field(default=())


def contents_of(value: object, name: str, what: str) -> Contents:
    """Take an object apart.

    Args:
        value: (x, y), ((x, y), (x_test, y_test)), a torch data set, a pair of them, or a dict.
        name: what to call the data set.
        what: what the object is, for messages.

    Raises:
        BadData: it is of another kind, or lacks inputs or targets.
    """
    if is_dataset(value):
        return Contents(name, _parts(train=value), labels=_dataset_labels(value))
    if isinstance(value, Mapping):
        return from_keys(value, name, what)
    if isinstance(value, tuple | list) and len(value) == 2:
        first, second = value
        if is_dataset(first) and is_dataset(second):
            return Contents(name, _parts(train=first, test=second), labels=_dataset_labels(first))
        if isinstance(first, tuple) and isinstance(second, tuple):
            return Contents(name, {"train": _pair(first, what), "test": _pair(second, what)})
        return Contents(name, {"train": (first, second)})
    found = type(value).__name__ + (f" of {len(value)}" if isinstance(value, Sequence) else "")
    raise BadData(f"{what} is a {found}; {_EXPECTED}")


def from_keys(values: Mapping[str, object], name: str, what: str) -> Contents:
    """Take a dict or an NPZ file apart by its keys; a key is a part and 'x' or 'y', or one of their synonyms.

    Raises:
        BadData: inputs or targets are missing, or two keys stand for the same; with the keys found.
    """
    listed = ", ".join(map(str, values)) or "none"
    slots: dict[tuple[str, str], str] = {}
    for key in values:
        slot = _slot(str(key))
        if slot is None:
            continue
        if slot in slots:
            raise BadData(
                f"the keys '{slots[slot]}' and '{key}' of {what} stand for the same; keep one of them"
            )
        slots[slot] = key
    parts: dict[str, tuple[object, object]] = {}
    for part in ("train", "validation", "test"):
        x, y = slots.get((part, "inputs")), slots.get((part, "targets"))
        if x is not None and y is not None:
            parts[part] = values[x], values[y]
        elif x is not None or y is not None or part == "train":
            lacks = "targets" if x is not None else "inputs" if y is not None else "inputs and targets"
            raise BadData(
                f"{what} lacks the {part} {lacks}; keys found: {listed}; expected 'x_train' and 'y_train' "
                f"(also 'x_test' and 'y_test', 'x_val' and 'y_val'), or 'x' and 'y'"
            )
    classes = values.get("classes")
    names = next((values[key] for key in _NAMES if key in values), ())
    return Contents(name, parts, classes if isinstance(classes, int) else None, _texts(names))


def _slot(key: str) -> tuple[str, str] | None:
    """Return the part and the kind that a key such as 'x_train', 'test_labels' or 'X' stands for."""
    words = key.lower().split("_")
    part = "train"
    if len(words) == 2:
        for word in words:
            if word in PARTS:
                part = PARTS[word]
                words = [other for other in words if other != word]
                break
    if len(words) == 1 and words[0] in _INPUTS:
        return part, "inputs"
    if len(words) == 1 and words[0] in _TARGETS:
        return part, "targets"
    return None


def _pair(value: tuple[object, ...], what: str) -> tuple[object, object]:
    if len(value) != 2:
        raise BadData(f"{what} has a part that is a tuple of {len(value)}; {_EXPECTED}")
    return value[0], value[1]


def _parts(**datasets: object) -> dict[str, tuple[object, object]]:
    return {part: read_items(dataset, part) for part, dataset in datasets.items()}


def _texts(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        return ()
    return tuple(str(name) for name in names)


def _dataset_labels(dataset: object) -> tuple[str, ...]:
    """Return the classes' names where the data set has them as torchvision's do, in `classes`."""
    names = getattr(dataset, "classes", ())
    return _texts(names) if isinstance(names, tuple | list) else ()
