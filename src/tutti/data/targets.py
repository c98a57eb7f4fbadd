"""Targets: classes or amounts, as scikit-learn's `type_of_target` tells them apart, over all parts together.

one for each sample         texts, booleans         classes, named by them, in sorted order
                            whole numbers           classes, where they are few, or 0..K-1 in an array
                            other numbers           amounts
several for each sample     0 and 1, a single 1     classes: they are one-hot
                            0 and 1                 flags: labels of which any number may hold
                            other floats            amounts
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tutti.data.arrays import chunks_of, float_dtype, refuse_not_finite
from tutti.data.contents import ReadData
from tutti.data.rows import Array
from tutti.errors import BadData

NO_LABEL: Final = -100
"""The class number of a sample that has no label: torch's losses ignore it by default."""

FEW: Final = 20
"""Whole numbers with more different values may be amounts as well as classes."""

CLASSES: Final = "classes"
AMOUNTS: Final = "amounts"
AS_GIVEN: Final = "as given"

_MEANT: Final = {"auto": CLASSES, "cross_entropy": CLASSES, "nll": CLASSES, "mse": AMOUNTS, "l1": AMOUNTS}

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WHOLE: Final = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0*)?")  # 007 is a code, and another than 7
_DATE: Final = re.compile(r"(\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{4})([ T].*)?")

_MOST_NAMED: Final = 10


def meant_by(loss: str) -> str:
    """Return what whole numbers are for a loss: `CLASSES`, `AMOUNTS`, or `AS_GIVEN`: floats stay floats."""
    return _MEANT.get(loss, AS_GIVEN)


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
    contents: ReadData, given: int | None, known: KnownClasses | str = CLASSES
) -> ReadData:
    """Decide whether the targets are classes or amounts, and check them.

    Args:
        contents: the data set as it was read.
        given: the number of classes; 0: the targets are amounts; None: as the targets say.
        known: the classes of a trained model, whose numbers the targets get; or what `meant_by` returns.

    Returns:
        The data set with int64 for classes, of shape (samples,), or (samples, ...) where each position of a
        sample has a label; else floats of shape (samples, ...), and no classes. `NO_LABEL` stays.

    Raises:
        BadData: targets that are neither, or may be both, or do not fit the classes that are given or known.
        NotFinite: NaN or inf among float targets.
    """
    flat = _of_one_kind(contents)
    if isinstance(known, KnownClasses):
        return _as_known(contents, flat, known)
    classes = contents.classes if given is None else given
    if _are_texts(flat):
        return _of_texts(contents, flat, classes)
    if classes is not None:
        return _as_stated(contents, flat, classes)
    several = any(values.ndim > 1 for values in flat.values())
    return (_of_several if several else _of_numbers)(contents, flat, known)


def _of_one_kind(contents: ReadData) -> dict[str, Array]:
    """Return the targets of each part, (samples, 1) as (samples,): texts in all parts, or numbers in all."""
    flat = {}
    for part, (_, values) in contents.parts.items():
        if values.dtype.kind not in "biufUS" or not values.size:
            raise BadData(
                f"the {part} targets are of type {values.dtype} and shape {values.shape}; give numbers or "
                "texts"
            )
        if values.dtype.kind not in "US":
            refuse_not_finite(f"{part} targets", values)
        flat[part] = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    texts = any(values.dtype.kind in "US" for values in flat.values())
    return {part: _as_texts(values) for part, values in flat.items()} if texts else flat


def _are_texts(flat: Mapping[str, Array]) -> bool:
    return next(iter(flat.values())).dtype.kind == "U"


def _as_texts(values: Array) -> Array:
    """Return texts of any kind as Python has them, and numbers in digits."""
    if values.dtype.kind == "U":
        return values
    if values.dtype.kind == "S":
        decoded: Array = np.char.decode(values, "utf-8", "backslashreplace")
        return decoded
    different, at = np.unique(values, return_inverse=True)
    return np.array(_texts_of(different))[at]


def _of_texts(contents: ReadData, flat: Mapping[str, Array], classes: int | None) -> ReadData:
    """Number classes that are texts in sorted order."""
    for part, values in flat.items():
        if values.ndim != 1:
            raise BadData(f"the {part} targets are texts of shape {values.shape}; give one for each sample")
    names = _different(flat)
    if classes is None:
        _refuse_no_classes(contents, names)
    elif classes < len(names):
        asked = f"{classes} classes were" if classes else "amounts were"
        raise BadData(
            f"{_what(contents)} has {len(names)} different texts, such as '{names[0]}', but {asked} asked for"
        )
    labels = _texts_of(names)
    numbers = {part: np.searchsorted(names, values).astype(np.int64) for part, values in flat.items()}
    return _kept(contents, numbers, classes or len(labels), labels if classes in (None, len(labels)) else ())


def _refuse_no_classes(contents: ReadData, names: Array) -> None:
    """Refuse texts that are no names of classes."""
    _refuse_constant(contents, names)
    samples, count, found = _samples(contents), len(names), f"such as '{names[0]}'"
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if all(map(_DATE.fullmatch, names)):
        problem = f"has dates, {found}; give a number, such as the days since one of them"
    elif 0 < len(numbers) < count:
        other = next(name for name in names if not _NUMBER.fullmatch(name))
        problem = f"mixes numbers and texts, such as '{numbers[0]}' and '{other}'; mend it"
    elif count > FEW and 2 * count > samples:
        problem = f"has {count:,} different texts in {samples:,} samples, {found}; choose no identifier"
    else:
        return
    raise BadData(
        f"{_what(contents)} {problem}, or give --data.classes {count} if these are names of classes"
    )


def _of_several(contents: ReadData, flat: Mapping[str, Array], meant: str) -> ReadData:
    """Take one-hot targets for classes, other 0 and 1 for flags, and floats for amounts."""
    widths = {values.shape[1:] for values in flat.values()}
    if len(widths) == 1 and all(values.ndim == 2 and _are_flags(values) for values in flat.values()):
        if meant == CLASSES and all((values.sum(axis=1) == 1).all() for values in flat.values()):
            numbers = {part: values.argmax(axis=1) for part, values in flat.items()}
            return _kept(contents, numbers, widths.pop()[0], contents.targets)
        return replace(_as_amounts(contents), labels=contents.targets)
    if meant == AMOUNTS or any(values.dtype.kind == "f" for values in flat.values()):
        return _as_amounts(contents)
    raise BadData(
        f"{_what(contents)} has whole numbers of the shape {flat['train'].shape}, which may be labels or "
        "amounts; give --data.classes N if every position has a label, or --data.classes none if they are "
        "amounts"
    )


def _of_numbers(contents: ReadData, flat: Mapping[str, Array], meant: str) -> ReadData:
    """Decide about one number, or one boolean, for each sample."""
    floats, in_table = any(values.dtype.kind == "f" for values in flat.values()), bool(contents.columns)
    kept = (meant == AMOUNTS and (floats or in_table)) or (meant == AS_GIVEN and floats)
    if kept or any(map(_has_fractions, flat.values())):
        if meant != AS_GIVEN:  # A loss of the user's may have no use for targets.
            _refuse_constant(contents, np.unique([(one.min(), one.max()) for one in flat.values()]))
        return _as_amounts(contents)
    values = _different(flat)
    _refuse_constant(contents, values)
    if values.dtype.kind == "b":
        return _by_value(contents, flat, values)
    if contents.labels:
        return _as_stated(contents, flat, max(int(values[-1]) + 1, len(contents.labels)))
    count, dense = len(values), values[0] in (0, 1) and values[-1] - values[0] == len(values) - 1
    if count > FEW and (floats or in_table or not dense or 2 * count > _samples(contents)):
        if meant == AMOUNTS or (floats and not in_table and not dense):
            return _as_amounts(contents)
        raise BadData(
            f"{_what(contents)} has {count:,} different whole numbers, from {values[0]:,.0f} to "
            f"{values[-1]:,.0f}, which may be classes or amounts; give --data.classes none if they are "
            f"amounts, or --data.classes {count} if they are classes"
        )
    # In arrays some class numbers may be lacking, and -1 may stand for no label, but for -1 and 1.
    lacking = (values[0] == 0 and values[-1] < FEW) or (values[0] < 0 and not np.array_equal(values, (-1, 1)))
    if (dense and values[0] == 0) or (lacking and not in_table):
        return _as_stated(contents, flat, int(values[-1]) + 1)
    return _by_value(contents, flat, values)


def _as_stated(contents: ReadData, flat: Mapping[str, Array], classes: int) -> ReadData:
    """Return targets as class numbers of that many classes, or as values of that many; 0: as amounts."""
    if classes == 0:
        return _as_amounts(contents)
    whole = {part: _whole(part, values) for part, values in flat.items()}
    values = _different(whole)
    outside = values[0] < 0 or values[-1] >= classes
    if outside and len(values) == classes and all(one.ndim == 1 for one in whole.values()):
        return _by_value(contents, whole, values)
    for part, one in whole.items():
        _refuse_outside(part, one, classes)
    return _kept(contents, whole, classes, contents.labels if len(contents.labels) == classes else ())


def _by_value(contents: ReadData, flat: Mapping[str, Array], values: Array) -> ReadData:
    """Number classes in the order of their values, which name them: whole numbers or booleans."""
    numbers = {part: _renumbered(one, values, np.arange(len(values))) for part, one in flat.items()}
    names = values if values.dtype.kind == "b" else values.astype(np.int64)
    return _kept(contents, numbers, len(names), tuple(names.tolist()))


def _as_amounts(contents: ReadData) -> ReadData:
    floats = {part: values.astype(float_dtype()) for part, (_, values) in contents.parts.items()}
    return _kept(contents, floats, None, ())


def _kept(
    contents: ReadData, targets: dict[str, Array], classes: int | None, labels: tuple[Any, ...]
) -> ReadData:
    parts = {part: (inputs, targets[part]) for part, (inputs, _) in contents.parts.items()}
    return replace(contents, parts=parts, classes=classes, labels=labels)


def _as_known(contents: ReadData, flat: Mapping[str, Array], known: KnownClasses) -> ReadData:
    """Give targets the meaning and the numbers that a model knows."""
    if known.count is None and not _are_texts(flat):
        return _as_amounts(contents)
    labels, names = contents.labels, known.names or tuple(map(str, range(known.count or 0)))
    if all(_are_flags(values) and values.shape[1] == known.count for values in flat.values()):
        flat, labels = {part: values.argmax(axis=1) for part, values in flat.items()}, contents.targets
    # Numbers are those of the classes where there are names for them here, or the model's are no numbers.
    numbered = not _are_texts(flat) and not any(map(_NUMBER.fullmatch, map(_plain, names)))
    for part, one in flat.items() if labels or numbered else ():
        _refuse_outside(part, _whole(part, one), len(labels or names))
    values = _different(flat)
    if labels or not numbered:
        here = [str(labels[int(value)]) for value in values] if labels else _texts_of(values)
        places = _places(contents, here, names, known)
    else:
        places = values.astype(np.int64)
    numbers = {part: _renumbered(one, values, places) for part, one in flat.items()}
    return _kept(contents, numbers, known.count, known.names)


def _places(contents: ReadData, here: Sequence[str], names: Sequence[str], known: KnownClasses) -> Array:
    """Return the number of each label among the names of a model, which may be written differently."""
    exact = {name: number for number, name in enumerate(names)}
    alike = {_plain(name): number for number, name in enumerate(names)}
    found = [exact.get(text, alike.get(_plain(text)) if len(alike) == len(names) else None) for text in here]
    if None in found:
        trained = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        raise BadData(
            f"{contents.name} has the class '{here[found.index(None)]}', but the model was trained on "
            f"{trained if known.count else 'amounts'}; give data of the same classes"
        )
    return np.array(found, np.int64)


def _plain(text: str) -> str:
    """Return a label in the form that all ways to write it have: true, True, 1.0 and 1 are the same."""
    plain = text.strip().lower()
    plain = {"true": "1", "false": "0"}.get(plain, plain)
    whole = _WHOLE.fullmatch(plain)
    return whole[1] if whole else plain


def _digits(value: float) -> str:
    return f"{value:.0f}" if value == np.floor(value) else f"{value:.17g}"


def _renumbered(values: Array, different: Array, places: Array) -> Array:
    """Replace each of the different values by the number at its place."""
    found: Array = places[np.searchsorted(different, values).clip(0, len(places) - 1)]
    return found if values.dtype.kind == "U" else np.where(values == NO_LABEL, NO_LABEL, found)


def _different(flat: Mapping[str, Array]) -> Array:
    """Return the different values of all parts, sorted, without `NO_LABEL`; refuse targets without any."""
    chunks = (chunk for values in flat.values() for _, chunk in chunks_of(values))
    found = np.unique(np.concatenate([np.unique(chunk) for chunk in chunks]))
    found = found if found.dtype.kind == "U" else found[found != NO_LABEL]
    if not len(found):
        raise BadData(f"no sample has a label: all targets are {NO_LABEL}; give class numbers from 0")
    return found


def _texts_of(values: Array) -> tuple[str, ...]:
    return tuple(map(_digits if values.dtype.kind in "iuf" else str, values.tolist()))


def _are_flags(values: Array) -> bool:
    return values.ndim == 2 and bool(((values == 0) | (values == 1)).all())


def _has_fractions(values: Array) -> bool:
    return values.dtype.kind == "f" and any((one != np.floor(one)).any() for _, one in chunks_of(values))


def _whole(part: str, values: Array) -> Array:
    if values.dtype.kind == "f":
        broken = values != np.floor(values)
        if broken.any():
            raise BadData(
                f"the {part} targets are no class numbers: {_first(values, broken)}, and "
                f"{int(broken.sum()):,} of {values.size:,} are not whole; if they are amounts, leave "
                "--data.classes out"
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


def _refuse_constant(contents: ReadData, different: Array) -> None:
    if len(different) == 1:
        raise BadData(
            f"{_what(contents)} is '{_texts_of(different)[0]}' in every sample, so that there is nothing to "
            "learn; choose another target, or give --data.classes N if there are classes without samples"
        )


def _what(contents: ReadData) -> str:
    return f"the target '{contents.targets[0]}'" if len(contents.targets) == 1 else "the target"


def _samples(contents: ReadData) -> int:
    return sum(len(targets) for _, targets in contents.parts.values())


def _first(values: Array, wrong: Array) -> str:
    """Name the first wrong value and its sample."""
    at = int(wrong.argmax())
    return f"sample {at * len(values) // values.size} has {values.flat[at]}"
