"""Targets: class numbers or float values, checked over all parts of a data set together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tutti.data.arrays import float_dtype, refuse_not_finite
from tutti.data.contents import ReadData
from tutti.data.rows import Array
from tutti.errors import BadData

NO_LABEL: Final = -100
"""The class number of a sample that has no label: torch's losses ignore it by default."""

_MANY = 1000
"""Integer targets that reach beyond this, and beyond ten times the samples, are amounts, not classes."""


@dataclass(frozen=True)
class KnownClasses:
    """The classes that a trained model tells apart, which other data may have in another order, or not all.

    Attributes:
        count: how many; None: it was trained on floats.
        names: of them; empty: they have none.
    """

    count: int | None
    names: tuple[str, ...] = ()


def with_checked_targets(
    contents: ReadData, given: int | None, known: KnownClasses | None = None
) -> ReadData:
    """Decide whether the targets are classes or values, and check them.

    Whole numbers and booleans of one dimension are classes; texts are classes named by them, in sorted
    order; floats are values to approach, unless `given` is their number of classes. Several 0/1 targets for
    each sample become floats, unless `given`: then each position, such as a token or a pixel, has a class.
    The class number -100 stands for no label. Of the classes of a model that are `known`, all get the numbers
    that they have there.

    Returns:
        The data set with int64 for classes, of shape (samples,), or (samples, ...) where each position of a
        sample has a label; else floats of shape (samples, ...), and no classes.

    Raises:
        BadData: labels outside 0..classes-1, labels that are no whole numbers, or targets of another type.
        NotFinite: NaN or inf among float targets.
    """
    classes = given
    if given is None:
        classes = contents.classes if known is None else known.count
    flat = {part: _flattened(y, classes) for part, (_, y) in contents.parts.items()}
    if known is not None and known.names and not contents.labels:
        # Names such as 1, 2 and A: data without the class A hold numbers.
        texts = {part: _as_texts(values) for part, values in flat.items()}
        flat = texts if all(np.isin(values, known.names).all() for values in texts.values()) else flat
    kinds = {values.dtype.kind for values in flat.values()}
    if kinds <= {"U", "S"}:
        named = _named(contents, flat, classes if known is None else None)
        return named if known is None else _renumbered(named, known)
    for part, values in flat.items():
        if values.dtype.kind not in "biuf" or not values.size:
            raise BadData(
                f"the {part} targets are of type {values.dtype} and shape {values.shape}; give numbers, or "
                "texts in all parts"
            )
        refuse_not_finite(f"{part} targets", values)
    amounts = "f" in kinds or known is not None or all(map(_several_flags, flat.values()))
    if classes is None and amounts:
        floats = {part: values.astype(float_dtype()) for part, values in flat.items()}
        return _kept(contents, floats, None, ())
    whole = {part: _whole(part, values, classes) for part, values in flat.items()}
    if known is not None and known.names and contents.labels:
        for part, values in whole.items():
            _refuse_outside(part, values, len(contents.labels))
        return _renumbered(_kept(contents, whole, len(contents.labels), contents.labels), known)
    expected = _number_of_classes(contents, whole, classes)
    return _kept(contents, whole, expected, contents.labels if len(contents.labels) == expected else ())


def _kept(
    contents: ReadData, targets: dict[str, Array], classes: int | None, labels: tuple[str, ...]
) -> ReadData:
    parts = {part: (inputs, targets[part]) for part, (inputs, _) in contents.parts.items()}
    return replace(contents, parts=parts, classes=classes, labels=labels)


def _flattened(values: Array, classes: int | None) -> Array:
    """Flatten (samples, 1) to one class number each, unless they are floats not meant as classes."""
    column = values.ndim == 2 and values.shape[1] == 1
    return values[:, 0] if column and (values.dtype.kind != "f" or classes is not None) else values


def _several_flags(values: Array) -> bool:
    return values.ndim == 2 and values.dtype.kind in "biu" and bool(((values == 0) | (values == 1)).all())


def _as_texts(values: Array) -> Array:
    """Return texts of any kind as Python has them, and numbers in digits."""
    if values.dtype.kind != "S":
        return values.astype(np.str_, copy=False)
    decoded: Array = np.char.decode(values, "utf-8", "backslashreplace")
    return decoded


def _named(contents: ReadData, flat: dict[str, Array], classes: int | None) -> ReadData:
    """Number classes that are texts in sorted order."""
    for part, values in flat.items():
        if values.ndim != 1:
            raise BadData(f"the {part} targets are texts of shape {values.shape}; give one for each sample")
    texts = {part: _as_texts(values) for part, values in flat.items()}
    names = np.unique(np.concatenate([np.unique(values) for values in texts.values()]))
    if classes is not None and classes < len(names):
        raise BadData(f"the targets have {len(names)} different texts, but {classes} classes were asked for")
    labels = tuple(str(name) for name in names)
    numbers = {part: np.searchsorted(names, values).astype(np.int64) for part, values in texts.items()}
    return _kept(contents, numbers, classes or len(labels), labels if classes in (None, len(labels)) else ())


def _renumbered(contents: ReadData, known: KnownClasses) -> ReadData:
    """Give named classes the numbers that a model knows."""
    numbers = {name: number for number, name in enumerate(known.names)}
    places = np.array([numbers.get(name, -1) for name in contents.labels])
    found = {}
    for part, (_, values) in contents.parts.items():
        found[part] = np.where(values == NO_LABEL, NO_LABEL, places[values.clip(0)])
        unknown = values[found[part] == -1]
        if unknown.size:
            trained = ", ".join(known.names) or ("numbers" if known.count else "amounts")
            raise BadData(
                f"{contents.name} has the class '{contents.labels[unknown[0]]}', but the model was trained "
                f"on {trained}; give data of the same classes"
            )
    return _kept(contents, found, known.count, known.names)


def _number_of_classes(contents: ReadData, whole: dict[str, Array], classes: int | None) -> int:
    """Return the number of classes of targets that are class numbers; refuse amounts and other labels."""
    largest = max(int(values.max()) for values in whole.values())
    if largest == NO_LABEL:
        raise BadData(f"no sample has a label: all targets are {NO_LABEL}; give class numbers from 0")
    expected = classes if classes is not None else max(largest + 1, len(contents.labels))
    for part, values in whole.items():
        _refuse_outside(part, values, expected)
    samples = sum(map(len, whole.values()))
    if classes is None and largest >= max(_MANY, 10 * samples):
        raise BadData(
            f"the targets are whole numbers up to {largest:,} for {samples:,} samples, which look like "
            f"amounts, not classes; convert them to floats to approach them, or give --data.classes N"
        )
    if classes is None and expected == 1:
        raise BadData(
            "all samples are of one class, so that there is nothing to tell apart; give other data, or "
            "--data.classes N if there are classes without samples"
        )
    return expected


def _whole(part: str, values: Array, classes: int | None) -> Array:
    if values.ndim != 1 and classes is None:
        raise BadData(
            f"the {part} targets are whole numbers of the shape {values.shape}, which may be labels or "
            "amounts; convert them to floats if they are amounts, or give --data.classes N if every position "
            "has a label"
        )
    if values.dtype.kind == "f":
        broken = values != np.floor(values)
        if broken.any():
            raise BadData(
                f"the {part} targets are no class numbers: {_first(values, broken)}, and "
                f"{int(broken.sum()):,} of {values.size:,} are not whole; if they are amounts, train on "
                "them without --data.classes"
            )
    return values.astype(np.int64)


def _refuse_outside(part: str, values: Array, classes: int) -> None:
    outside = ((values < 0) & (values != NO_LABEL)) | (values >= classes)
    if outside.any():
        raise BadData(
            f"the {part} targets have {int(outside.sum()):,} labels outside 0..{classes - 1}: "
            f"{_first(values, outside)}; number the classes from 0, write {NO_LABEL} for no label, and "
            "give a trained model data of its classes"
        )


def _first(values: Array, wrong: Array) -> str:
    """Name the first wrong value and its sample."""
    at = int(wrong.argmax())
    return f"sample {at * len(values) // values.size} has {values.flat[at]}"
