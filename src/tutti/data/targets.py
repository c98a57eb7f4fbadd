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
from typing import Final

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

_MEANT: Final = dict.fromkeys(("auto", "cross_entropy", "nll"), CLASSES) | dict.fromkeys(
    ("mse", "l1"), AMOUNTS
)

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_LEADING_ZERO: Final = re.compile(r"[+-]?0\d.*")
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
    contents: ReadData, given: int | None, known: KnownClasses | None = None, meant: str = CLASSES
) -> ReadData:
    """Decide whether the targets are classes or amounts, and check them.

    Args:
        contents: the data set as it was read.
        given: the number of classes; 0: the targets are amounts; None: as the targets say.
        known: the classes of a trained model, whose numbers the targets get.
        meant: as of `meant_by`.

    Returns:
        The data set with int64 for classes, of shape (samples,), or (samples, ...) where each position of a
        sample has a label; else floats of shape (samples, ...), and no classes. `NO_LABEL` stays.

    Raises:
        BadData: targets that are neither, or may be both, or do not fit the classes that are given or known.
        NotFinite: NaN or inf among float targets.
    """
    flat = _of_one_kind(contents)
    if known is not None:
        return _as_known(contents, flat, known)
    classes = contents.classes if given is None else given
    if _are_texts(flat):
        return _of_texts(contents, flat, classes)
    if classes is not None:
        return _as_stated(contents, flat, classes)
    several = any(values.ndim > 1 for values in flat.values())
    return (_of_several if several else _of_numbers)(contents, flat, meant)


def _of_one_kind(contents: ReadData) -> dict[str, Array]:
    """Return the targets of each part, (samples, 1) as (samples,): numbers in all parts, or texts in all."""
    flat = {
        part: values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        for part, (_, values) in contents.parts.items()
    }
    texts = {part for part, values in flat.items() if values.dtype.kind in "US"}
    for part, values in flat.items():
        if part not in texts and (values.dtype.kind not in "biuf" or not values.size):
            raise BadData(
                f"the {part} targets are of type {values.dtype} and shape {values.shape}; give numbers or "
                "texts"
            )
        if part not in texts:
            refuse_not_finite(f"{part} targets", values)
    if texts:
        return {part: _as_texts(values) for part, values in flat.items()}
    return flat


def _are_texts(flat: Mapping[str, Array]) -> bool:
    return next(iter(flat.values())).dtype.kind == "U"


def _as_texts(values: Array) -> Array:
    """Return texts of any kind as Python has them, and numbers in digits."""
    if values.dtype.kind == "S":
        decoded: Array = np.char.decode(values, "utf-8", "backslashreplace")
        return decoded
    if values.dtype.kind == "f":
        different, at = np.unique(values, return_inverse=True)
        texts: Array = np.array([f"{value:.17g}" for value in different])[at]
        return texts
    return values.astype(np.str_, copy=False)


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
    what, samples, count = _what(contents), _samples(contents), len(names)
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    others = [name for name in names if not _NUMBER.fullmatch(name)]
    if all(map(_DATE.fullmatch, names)):
        raise BadData(
            f"{what} holds dates, such as '{names[0]}'; give a number, such as the days since a date, or "
            f"--data.classes {count} if each is the name of a class"
        )
    if numbers and others:
        raise BadData(
            f"{what} mixes numbers and texts, such as '{numbers[0]}' and '{others[0]}'; mend it, or give "
            f"--data.classes {count} if all are names of classes"
        )
    if count > FEW and 2 * count > samples:
        raise BadData(
            f"{what} has {count:,} different texts in {samples:,} samples, such as '{names[0]}', like an "
            f"identifier; choose another target, or give --data.classes {count} if they are classes"
        )
    _refuse_constant(contents, names)


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
        "amounts; give --data.classes none if they are amounts, or --data.classes N if every position has a "
        "label"
    )


def _of_numbers(contents: ReadData, flat: Mapping[str, Array], meant: str) -> ReadData:
    """Decide about one number, or one boolean, for each sample."""
    floats, in_table = any(values.dtype.kind == "f" for values in flat.values()), bool(contents.columns)
    kept = (meant == AMOUNTS and (floats or in_table)) or (meant == AS_GIVEN and floats)
    if kept or any(map(_has_fractions, flat.values())):
        if meant != AS_GIVEN:  # A loss of the user's may have no use for targets.
            _refuse_constant(contents, np.unique([(one.min(), one.max()) for one in flat.values()]))
        return _as_amounts(contents)
    if all(values.dtype.kind == "b" for values in flat.values()):
        _refuse_constant(contents, _different(flat))
        return _by_value(contents, flat, np.array([False, True]), "bool")
    values = _different(flat)
    _refuse_constant(contents, values)
    if contents.labels:
        return _as_stated(contents, flat, max(int(values[-1]) + 1, len(contents.labels)))
    count, dense = len(values), bool(values[0] == 0 and values[-1] == len(values) - 1)
    numbered = dense and not floats and not in_table and 2 * count <= _samples(contents)
    if count > FEW and not numbered:
        if meant == AMOUNTS or (floats and not in_table and not dense):
            return _as_amounts(contents)
        raise BadData(
            f"{_what(contents)} has {count:,} different whole numbers, from {values[0]:,.0f} to "
            f"{values[-1]:,.0f}, which may be classes or amounts; give --data.classes none if they are "
            f"amounts, or --data.classes {count} if they are classes"
        )
    # In arrays some class numbers may be lacking, and one below 0 of several may stand for no label.
    lacking = (values[0] == 0 and values[-1] < FEW) or (values[0] < 0 and count > 2)
    if dense or (lacking and not in_table):
        return _as_stated(contents, flat, int(values[-1]) + 1)
    return _by_value(contents, flat, values, "int")


def _as_stated(contents: ReadData, flat: Mapping[str, Array], classes: int) -> ReadData:
    """Return targets as class numbers of that many classes, or as values of that many; 0: as amounts."""
    if classes == 0:
        return _as_amounts(contents)
    whole = {part: _whole(part, values) for part, values in flat.items()}
    values = _different(whole)
    outside = values[0] < 0 or values[-1] >= classes
    if outside and len(values) == classes and all(one.ndim == 1 for one in whole.values()):
        return _by_value(contents, whole, values, "int")
    for part, one in whole.items():
        _refuse_outside(part, one, classes)
    return _kept(contents, whole, classes, contents.labels if len(contents.labels) == classes else ())


def _by_value(contents: ReadData, flat: Mapping[str, Array], values: Array, label_type: str) -> ReadData:
    """Number classes in the order of their values, which name them."""
    numbers = {part: _renumbered(one, values, np.arange(len(values))) for part, one in flat.items()}
    names = _texts_of(values)
    return replace(_kept(contents, numbers, len(names), names), label_type=label_type)


def _as_amounts(contents: ReadData) -> ReadData:
    floats = {part: values.astype(float_dtype()) for part, (_, values) in contents.parts.items()}
    return _kept(contents, floats, None, ())


def _kept(
    contents: ReadData, targets: dict[str, Array], classes: int | None, labels: tuple[str, ...]
) -> ReadData:
    parts = {part: (inputs, targets[part]) for part, (inputs, _) in contents.parts.items()}
    return replace(contents, parts=parts, classes=classes, labels=labels)


def _as_known(contents: ReadData, flat: Mapping[str, Array], known: KnownClasses) -> ReadData:
    """Give targets the meaning and the numbers that a model knows."""
    if known.count is None and not _are_texts(flat):
        return _as_amounts(contents)
    labels = contents.labels
    if all(
        values.ndim == 2 and values.shape[1] == known.count and _are_flags(values) for values in flat.values()
    ):
        flat, labels = {part: values.argmax(axis=1) for part, values in flat.items()}, contents.targets
    values = _different(flat)
    names = known.names or tuple(map(str, range(known.count or 0)))
    if labels:
        for part, one in flat.items():
            _refuse_outside(part, one, len(labels))
    here = [labels[int(value)] for value in values] if labels else _texts_of(values)
    if _are_texts(flat) or labels or any(map(_NUMBER.fullmatch, map(_plain, names))):
        places = _places(contents, here, names, known)
    else:  # The names are no numbers, so that numbers are those of the classes.
        for part, one in flat.items():
            _refuse_outside(part, _whole(part, one), len(names))
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
    if _NUMBER.fullmatch(plain) and not _starts_with_zero(plain):
        plain = _digits(float(plain))
    return plain


def _starts_with_zero(text: str) -> bool:
    """Return whether a text is a code such as 007, which is another than 7."""
    return _LEADING_ZERO.fullmatch(text) is not None


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
