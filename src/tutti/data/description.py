"""A description of a data set: the contents of its parts, and problems for training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tutti.data.arrays import samples_per_chunk, stored_dtype, values_of
from tutti.data.columns import Column, Columns, Stored, columns_of
from tutti.data.contents import Contents
from tutti.data.rows import Array, Rows

_RARE: Final = 0.1
"""A class is rare if it has less than this share of the samples of the largest one."""

_WIDE: Final = 10.0
"""Floats of a larger mean or deviation train badly unless they are scaled."""


@dataclass(frozen=True)
class Values:
    """Statistics of one input, channel or target, without NaN."""

    name: str  # of the column, or of the channel
    mean: float  # of the values
    deviation: float  # from it
    least: float  # the smallest
    most: float  # the largest
    missing: int  # the number of NaN
    floats: bool = True  # they are stored as floats, so that a model gets them unscaled


@dataclass(frozen=True)
class PartDescription:
    """Contents of one part of a data set."""

    name: str  # "train", "validation" or "test"
    samples: int  # their number
    forms: tuple[str, ...]  # the shape and the dtype of each input in words, as the source has it
    inputs: tuple[Values, ...]  # of each column or channel
    targets: tuple[Values, ...]  # the amounts, of each output; empty for classes
    counts: tuple[int, ...]  # the samples of each class; empty for amounts
    incomplete: int  # the samples with a missing value
    repeated: int  # the samples whose input occurs earlier in this part
    trained: int  # the samples whose input occurs in the training part; 0 for that part


class _Statistics:
    """Statistics of values that come some samples at a time, separately for each of `names`."""

    def __init__(self, names: list[str], floats: bool = True) -> None:
        self._names, self._floats = names, floats
        self._chunks: list[Array] = []

    def add(self, chunk: Array) -> None:
        values = chunk.astype(np.float64).reshape(len(chunk), len(self._names), -1 if chunk.size else 0)
        there, over = ~np.isnan(values), (0, 2)
        known = there.sum(over)
        mean = values.sum(over, where=there) / np.maximum(1, known)
        squares = ((values - mean[:, None]) ** 2).sum(over, where=there)
        least = values.min(over, where=there, initial=np.inf)
        most = values.max(over, where=there, initial=-np.inf)
        self._chunks.append(np.stack([known, (~there).sum(over), mean, squares, least, most]))

    def described(self) -> Iterator[Values]:
        counts, missing, means, squares, least, most = np.stack(self._chunks, axis=1)
        total, lowest, highest = np.maximum(1, counts.sum(0)), least.min(0), most.max(0)
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(0) / total
        deviation = np.where(lowest == highest, 0, np.sqrt(variance))
        found = np.stack([mean, deviation, lowest, highest], axis=1).tolist()
        for name, (middle, spread, low, high), gaps in zip(self._names, found, missing.sum(0), strict=True):
            yield Values(name, middle, spread, low, high, int(gaps), self._floats)


def describe(contents: Contents[Stored[Rows], Array]) -> list[PartDescription]:
    """Describe each part of a data set; each sample is read once."""
    parts: list[PartDescription] = []
    trained: set[bytes] = set()
    for part, (stored, targets) in contents.parts.items():
        columns = columns_of(stored)
        labels = [_label(stored, at) for at in range(len(columns))]
        both = list(zip(columns, labels, strict=True))
        inputs = [
            _Statistics(_names(one, label, contents.columns), stored_dtype(values_of(one)).kind == "f")
            for one, label in both
        ]
        digests, incomplete = _read(columns, inputs, len(targets))
        counts: list[int] = []
        goals: list[Values] = []
        if contents.classes is None:
            known = contents.targets if len(contents.targets) == targets[:1].size else ()
            statistics = _Statistics(_names(Column(targets), (*known, "target")[0], known))
            statistics.add(targets)
            goals = list(statistics.described())
        else:
            counts = np.bincount(targets[targets >= 0].reshape(-1), minlength=contents.classes).tolist()
        parts.append(
            PartDescription(
                part,
                len(targets),
                tuple(_form(one, label) for one, label in both),
                tuple(values for one in inputs for values in one.described()),
                tuple(goals),
                tuple(counts),
                incomplete,
                len(targets) - len({*digests}),
                sum(one in trained for one in digests),
            )
        )
        trained = trained or {*digests}  # the training part is the first
    return parts


def _read(
    columns: tuple[Column[Rows], ...], inputs: list[_Statistics], count: int
) -> tuple[list[bytes], int]:
    """Read the samples of a part; return a digest of each, and the number with a missing value."""
    digests: list[bytes] = []
    incomplete = 0
    values = [values_of(one) for one in columns]
    step = max(1, min(samples_per_chunk(one) * count // max(1, len(one)) for one in values))
    for start in range(0, count, step):
        each = [_samples(column, start, min(start + step, count)) for column in columns]
        for statistics, samples in zip(inputs, each, strict=True):
            statistics.add(np.concatenate(samples))
        for sample in zip(*each, strict=True):
            incomplete += any(one.dtype.kind == "f" and np.isnan(one).any() for one in sample)
            digest = hashlib.blake2b(digest_size=16)
            for one in sample:
                digest.update(repr(one.shape).encode() + one.tobytes())
            digests.append(digest.digest())
    return digests, incomplete


def problems(contents: Contents[Stored[Rows], Array], parts: list[PartDescription]) -> list[str]:
    """Describe the problems for training, a sentence each."""
    train = parts[0]
    lines = [
        f"{part.incomplete:,} of {part.samples:,} {part.name} samples have missing values: leave them out by "
        "--data.missing drop, or let means stand for them by --data.missing mean"
        for part in parts
        if part.incomplete and contents.table is None and not contents.filled
    ]
    lines += [
        f"{part.trained:,} of {part.samples:,} {part.name} samples are in the training part, too: its "
        "figures will be better than the model; take them out of one"
        for part in parts
        if part.trained
    ]
    if train.repeated:
        lines.append(
            f"{train.repeated:,} training samples are there more than once: a validation part cut from the "
            "training part may hold what was trained on"
        )
    for at, count in enumerate(train.counts):
        name = contents.labels[at] if contents.labels else str(at)
        if count == 0:
            lines.append(f"no training sample is of class {name}")
        elif count < _RARE * max(train.counts):
            lines.append(
                f"class {name} has {count:,} training samples and the largest {max(train.counts):,}: "
                "accuracy hides what the model does with it"
            )
    if contents.table is not None:
        return lines  # columns are scaled, and constant ones left out
    constant = [one.name for one in train.inputs if one.deviation == 0]
    if constant:
        lines.append(f"{_first(constant)} never changes: it takes time and tells nothing")
    for kind, values in (("inputs", train.inputs), ("targets", train.targets)):
        wide = [one for one in values if one.floats and max(abs(one.mean), one.deviation) > _WIDE]
        if wide:
            lines.append(
                f"{_first([one.name for one in wide])} has the mean {wide[0].mean:.3g} and the deviation "
                f"{wide[0].deviation:.3g}: a model gets {kind} as they are; bring each to mean 0 "
                "and deviation 1"
            )
    return lines


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1:,} more)"


def _samples(column: Column[Rows], start: int, stop: int) -> list[Array]:
    """Return some samples of an input, each an array."""
    rows = column.rows[start:stop]
    if column.values is None:
        return [*rows[:, None]]
    first, last = int(rows[:, 0].min()), int(rows.sum(axis=1).max())
    read = column.values[first:last]
    return [read[begin - first : begin - first + length] for begin, length in rows.tolist()]


def _label(stored: Stored[Rows], at: int) -> str:
    """Return the name of an input, or its number if there are several; an only one has none."""
    if not isinstance(stored, Columns) or (len(stored.columns) == 1 and not stored.names):
        return ""
    return stored.names[at] if stored.names else f"input {at}"


def _names(column: Column[Rows], label: str, columns: tuple[str, ...]) -> list[str]:
    """Return the names of the statistics: a table's columns, or channels of pictures; else one for all."""
    values = values_of(column)
    if values.ndim == 2 and (values.shape[1] > 1 or not label):
        return [*columns] or [f"{label or 'input'} {number}" for number in range(values.shape[1])]
    if values.ndim == 4 and column.values is None:
        return [f"{label} channel {number}".strip() for number in range(values.shape[1])]
    return [label or "all inputs"]


def _form(column: Column[Rows], label: str) -> str:
    """Return the shape and the dtype of an input in words."""
    values = values_of(column)
    form = f"of shape {tuple(values.shape[1:])}, {values.dtype}"
    if column.values is not None:
        lengths = column.rows[:][:, 1]
        form = (
            f"sequences of length {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():.3g}, {form}"
        )
    return f"{label} {form}".strip()
