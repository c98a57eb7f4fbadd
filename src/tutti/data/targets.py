"""Targets: classes or amounts, as scikit-learn's `type_of_target` tells them apart, over all parts together.

one for each sample         texts, booleans         classes, named by them, in sorted order
                            whole numbers           classes where they are few, amounts where each is seldom
                            other numbers           amounts
several for each sample     0 and 1, a single 1     classes: they are one-hot
                            0 and 1                 flags: labels of which any number may hold
                            other floats            amounts
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tutti.data.arrays import chunks_of, float_dtype, refuse_not_finite, tell_if_rounded
from tutti.data.contents import ReadData
from tutti.data.rows import Array
from tutti.data.tables import listed
from tutti.errors import BadData

NO_LABEL: Final = -100
"""The class number of a sample that has no label: torch's losses ignore it by default."""

FEW: Final = 20
"""Whole numbers with more different values may be amounts as well as classes."""

SAMPLES_OF_A_CLASS: Final = 5
"""More than `FEW` whole numbers with gaps are amounts where each has fewer samples, on average."""

CLASSES: Final = "classes"
AMOUNTS: Final = "amounts"
AS_GIVEN: Final = "as given"

_MEANT: Final = {"auto": CLASSES, "cross_entropy": CLASSES, "nll": CLASSES, "mse": AMOUNTS, "l1": AMOUNTS}

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def meant_by(loss: str) -> str:
    """Return what whole numbers are for a loss: `CLASSES`, `AMOUNTS`, or `AS_GIVEN` (floats stay floats)."""
    return _MEANT.get(loss, AS_GIVEN)


@dataclass(frozen=True)
class KnownClasses:
    """The classes of a trained model; other data may have them in another order, or only some."""

    count: int | None  # their number; None: it was trained on floats
    names: tuple[str, ...] = ()  # of them; empty: they have none


def with_checked_targets(
    contents: ReadData, given: int | None, known: KnownClasses | str = CLASSES
) -> ReadData:
    """Decide whether the targets are classes or amounts, and check them.

    Args:
        contents: the data set after reading.
        given: the number of classes; 0: the targets are amounts; None: decide by the targets.
        known: the classes of a trained model, whose numbers the targets get; or a result of `meant_by`.

    Returns:
        The data set with int64 for classes, of shape (samples,), or (samples, ...) with a label for each
        position; else floats of shape (samples, ...), and no classes. `NO_LABEL` stays.
    """
    joined = _joined(contents)
    if isinstance(known, KnownClasses):
        return _as_known(contents, joined, known)
    classes = contents.classes if given is None else given
    if joined.dtype.kind == "U":
        return _of_texts(contents, joined, classes)
    if classes is not None:
        return _as_stated(contents, joined, classes)
    return (_of_numbers if joined.ndim == 1 else _of_several)(contents, joined, known)


def _joined(contents: ReadData) -> Array:
    """Return the targets of all parts concatenated, (samples, 1) as (samples,): texts if some are."""
    parts = contents.parts
    for part, (_, values) in parts.items():
        if values.dtype.kind not in "biufUS" or not values.size:
            raise BadData(
                f"the {part} targets are of type {values.dtype} and shape {values.shape}; give numbers or "
                "texts"
            )
        if values.shape[1:] != parts["train"][1].shape[1:]:
            raise BadData(
                f"the {part} targets have the shape {values.shape}, the train targets "
                f"{parts['train'][1].shape}; all parts need one shape for each target"
            )
        if values.dtype.kind not in "US":
            refuse_not_finite(f"{part} targets", values)
    every = [values for _, values in parts.values()]
    if any(values.dtype.kind in "US" for values in every):
        every = [*map(_as_texts, every)]
    joined = every[0] if len(every) == 1 else np.concatenate(every)
    return joined[:, 0] if joined.ndim == 2 and joined.shape[1] == 1 else joined


def _as_texts(values: Array) -> Array:
    """Return Python texts, with numbers in digits."""
    if values.dtype.kind == "U":
        return values
    if values.dtype.kind == "S":
        decoded: Array = np.char.decode(values, "utf-8", "backslashreplace")
        return decoded
    different, at = np.unique(values, return_inverse=True)
    return np.array(_texts_of(different))[at]


def _of_texts(contents: ReadData, joined: Array, classes: int | None) -> ReadData:
    """Number classes that are texts in sorted order."""
    if joined.ndim != 1:
        raise BadData(f"the targets are texts of shape {joined.shape}; give one for each sample")
    names = _different(joined)
    if classes is None:
        _refuse_constant(contents, names)
        if len(names) > FEW and 2 * len(names) > len(joined):
            raise BadData(
                f"{_what(contents)} has {len(names):,} different texts in {len(joined):,} samples, such as "
                f"'{names[0]}'; choose another target, give dates and quantities as numbers, or give "
                f"--data.classes {len(names)} if these are names of classes"
            )
    elif classes < len(names):
        asked = f"{classes} classes were" if classes else "numbers were"
        raise BadData(
            f"{_what(contents)} has {len(names)} different texts, such as '{names[0]}', but {asked} asked for"
        )
    count = classes or len(names)
    return _kept(
        contents, np.searchsorted(names, joined), count, _texts_of(names) if count == len(names) else ()
    )


def _of_several(contents: ReadData, joined: Array, meant: str) -> ReadData:
    """Treat one-hot targets as classes, other 0 and 1 as flags, and floats as amounts."""
    if are_flags(joined):
        if meant == CLASSES and (joined.sum(axis=1) == 1).all():
            return _kept(contents, joined.argmax(axis=1), joined.shape[1], contents.targets)
        return replace(_as_amounts(contents), labels=contents.targets)
    if meant == AMOUNTS or joined.dtype.kind == "f":
        return _as_amounts(contents)
    raise BadData(
        f"{_what(contents)} has whole numbers of the shape {joined.shape}, which may be labels or numbers "
        "to predict; give --data.classes N if every position has a label, or --data.classes none for "
        "regression"
    )


def _of_numbers(contents: ReadData, joined: Array, meant: str) -> ReadData:
    """Decide for targets of one number, or one boolean, for each sample."""
    floats, in_table = joined.dtype.kind == "f", bool(contents.columns)
    if (
        (meant == AMOUNTS and (floats or in_table))
        or (meant == AS_GIVEN and floats)
        or _has_fractions(joined)
    ):
        if meant != AS_GIVEN:  # A loss of the user's may have no use for targets.
            _refuse_constant(contents, np.unique([joined.min(), joined.max()]))
        return _as_amounts(contents)
    values = _different(joined)
    _refuse_constant(contents, values)
    if joined.dtype.kind == "b":
        return _by_value(contents, joined, values)
    if contents.labels:
        return _as_stated(contents, joined, max(int(values[-1]) + 1, len(contents.labels)))
    count, dense = len(values), values[0] in (0, 1) and values[-1] - values[0] == len(values) - 1
    if count > FEW and (floats or in_table or not dense or 2 * count > len(joined)):
        seldom = len(joined) < SAMPLES_OF_A_CLASS * count
        if meant == AMOUNTS or (not dense and (seldom or (floats and not in_table))):
            return _as_amounts(contents)
        raise BadData(
            f"{_what(contents)} has {count:,} different whole numbers, from {values[0]:,.0f} to "
            f"{values[-1]:,.0f}, which may be classes or numbers to predict; give --data.classes none for "
            f"regression, or --data.classes {count} if they are classes"
        )
    # In arrays some class numbers may be lacking, and -1 may stand for no label, but for -1 and 1.
    lacking = (values[0] == 0 and values[-1] < FEW) or (values[0] < 0 and not np.array_equal(values, (-1, 1)))
    if (dense and values[0] == 0) or (lacking and not in_table):
        return _as_stated(contents, joined, int(values[-1]) + 1)
    return _by_value(contents, joined, values)


def _as_stated(contents: ReadData, joined: Array, classes: int) -> ReadData:
    """Return targets as that many classes; 0: as amounts."""
    if classes == 0:
        return _as_amounts(contents)
    values = _different(joined)
    outside = values[0] < 0 or values[-1] >= classes
    if outside and joined.ndim == 1 and len(values) == classes and not _has_fractions(joined):
        return _by_value(contents, joined, values)
    _refuse_other_numbers(contents, joined, classes)
    return _kept(contents, joined, classes, contents.labels if len(contents.labels) == classes else ())


def _by_value(contents: ReadData, joined: Array, values: Array) -> ReadData:
    """Number classes in the order of their values, which are their names: whole numbers or booleans."""
    names = values if values.dtype.kind == "b" else values.astype(np.int64)
    numbers = _renumbered(joined, values, np.arange(len(values)))
    return _kept(contents, numbers, len(names), tuple(names.tolist()))


def _as_amounts(contents: ReadData) -> ReadData:
    train = contents.parts["train"][1]
    if train.size == len(train):
        tell_if_rounded(_what(contents), train.reshape(-1))
    parts = {part: (x, values.astype(float_dtype())) for part, (x, values) in contents.parts.items()}
    names = contents.targets if len(contents.targets) > 1 else ()
    return replace(contents, parts=parts, classes=None, labels=names)


def _kept(contents: ReadData, joined: Array, classes: int | None, labels: tuple[Any, ...]) -> ReadData:
    """Return class numbers of all parts as the targets of each."""
    parts = {
        part: (contents.parts[part][0], joined[own].astype(np.int64)) for part, own in _of_parts(contents)
    }
    return replace(contents, parts=parts, classes=classes, labels=labels)


def _of_parts(contents: ReadData) -> Iterator[tuple[str, slice]]:
    """Yield each part, and the slice of its targets in the joined ones."""
    start = 0
    for part, (_, targets) in contents.parts.items():
        yield part, slice(start, start + len(targets))
        start += len(targets)


def _as_known(contents: ReadData, joined: Array, known: KnownClasses) -> ReadData:
    """Give targets the meaning and the numbers of a model."""
    if known.count is None and joined.dtype.kind != "U":
        return _as_amounts(contents)
    labels, names = contents.labels, known.names or tuple(map(str, range(known.count or 0)))
    if are_flags(joined) and joined.shape[1] == known.count:
        joined, labels = joined.argmax(axis=1), contents.targets
    if joined.dtype.kind == "b":
        joined = joined.astype(np.int64)
    # Numbers are those of the classes where there are names for them here, or the model's are no numbers.
    numbered = joined.dtype.kind != "U" and not any(map(_NUMBER.fullmatch, names))
    if labels or numbered:
        _refuse_other_numbers(contents, joined, len(labels or names))
    values = _different(joined)
    places = values
    if labels or not numbered:
        here = [str(labels[int(value)]) for value in values] if labels else _texts_of(values)
        places = _places(contents, here, names, known)
    return _kept(contents, _renumbered(joined, values, places), known.count, known.names)


def _places(contents: ReadData, here: Sequence[str], names: Sequence[str], known: KnownClasses) -> Array:
    """Return the number of each label among the names of a model."""
    numbers = {name: number for number, name in enumerate(names)}
    new = next((text for text in here if text not in numbers), None)
    if new is not None:
        raise BadData(
            f"{contents.name} has the class '{new}', but the model was trained on "
            f"{listed(names) if known.count else 'numbers'}; give data of the same classes"
        )
    return np.array([numbers[text] for text in here], np.int64)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value == np.floor(value) else f"{value:.17g}"


def _renumbered(values: Array, different: Array, places: Array) -> Array:
    """Replace each of the different values by the number at its place."""
    numbers: Array = places[np.searchsorted(different, values).clip(0, len(places) - 1)]
    return numbers if values.dtype.kind == "U" else np.where(values == NO_LABEL, NO_LABEL, numbers)


def _different(values: Array) -> Array:
    """Return the distinct values, sorted, without `NO_LABEL`; refuse targets without any."""
    labels = np.unique(np.concatenate([np.unique(chunk) for _, chunk in chunks_of(values)]))
    labels = labels if labels.dtype.kind == "U" else labels[labels != NO_LABEL]
    if not len(labels):
        raise BadData(f"no sample has a label: all targets are {NO_LABEL}; give class numbers from 0")
    return labels


def _texts_of(values: Array) -> tuple[str, ...]:
    return tuple(map(_digits if values.dtype.kind in "iuf" else str, values.tolist()))


def are_flags(values: Array) -> bool:
    """Return whether there are several targets for each sample, each 0 or 1."""
    return values.ndim == 2 and values.dtype.kind in "biuf" and bool(((values == 0) | (values == 1)).all())


def _has_fractions(values: Array) -> bool:
    return values.dtype.kind == "f" and any((one != np.floor(one)).any() for _, one in chunks_of(values))


def _refuse_other_numbers(contents: ReadData, joined: Array, classes: int) -> None:
    """Refuse numbers that are not whole, or outside 0..classes-1, naming the first sample."""
    outside = (joined >= classes) | ((joined < 0) & (joined != NO_LABEL))
    wrong, fault = outside, f"outside 0..{classes - 1}"
    if _has_fractions(joined):
        wrong, fault = joined != np.floor(joined), "that are no whole numbers"
    for part, own in _of_parts(contents):
        at = np.argwhere(wrong[own])
        if len(at):
            raise BadData(
                f"the {part} targets have {len(at):,} labels {fault}: sample {at[0][0]} has "
                f"{joined[own][tuple(at[0])]}; number the classes from 0, write {NO_LABEL} for no label, "
                "give a trained model data of its classes, and leave --data.classes out for regression"
            )


def _refuse_constant(contents: ReadData, different: Array) -> None:
    if len(different) == 1:
        raise BadData(
            f"{_what(contents)} is '{_texts_of(different)[0]}' in every sample, so that there is nothing to "
            "learn; choose another target, or give --data.classes N if there are classes without samples"
        )


def _what(contents: ReadData) -> str:
    return f"the target '{contents.targets[0]}'" if len(contents.targets) == 1 else "the target"
