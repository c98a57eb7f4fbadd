"""A data set described: what is in its parts, and what would go wrong in training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    """Statistics of one input, channel or target; NaN is left out.

    Attributes:
        name: of the column, or of the channel.
        mean: of them.
        deviation: from it.
        least: the smallest.
        most: the largest.
        missing: how many are NaN.
        floats: they are kept as floats, so that a model gets them as they are.
    """

    name: str
    mean: float
    deviation: float
    least: float
    most: float
    missing: int
    floats: bool = True


@dataclass(frozen=True)
class PartDescription:
    """Contents of one part of a data set.

    Attributes:
        name: "train", "validation" or "test".
        samples: how many.
        forms: the shape and the type of each input in words, as the source has it.
        inputs: of each column or channel.
        incomplete: the samples with a missing value.
        counts: the samples of each class; empty where the targets are values.
        targets: the values to approach, of each output; empty where there are classes.
        repeated: the samples whose input an earlier one of this part has, too.
        trained: those whose input a training sample has, too; 0 for the training part.
        contrary: those whose input an earlier one has with another target.
    """

    name: str
    samples: int
    forms: tuple[str, ...]
    inputs: tuple[Values, ...]
    incomplete: int
    counts: tuple[int, ...]
    targets: tuple[Values, ...]
    repeated: int
    trained: int
    contrary: int


class _InputStatistics:
    """One input of a part, read some samples at a time.

    Args:
        column: the input.
        groups: the names of what is described on its own.
    """

    def __init__(self, column: Column[Rows], groups: list[str]) -> None:
        self._column, self._groups = column, groups
        self._mean, self._squares = np.zeros(len(groups)), np.zeros(len(groups))
        self._least, self._most = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
        self._missing, self._known = np.zeros((2, len(groups)), np.int64)

    def read(self, start: int, stop: int) -> tuple[list[Array], NDArray[np.bool_]]:
        """Return some samples, and which have a value that is NaN."""
        rows, values = self._column.rows[start:stop], self._column.values
        if values is None:
            self._note(rows)
            missing = np.isnan(rows.astype(np.float64)).reshape(len(rows), -1).any(axis=1)
            return [*rows], np.asarray(missing)
        first, last = int(rows[:, 0].min()), int(rows.sum(axis=1).max())
        read = values[first:last]
        samples = [read[begin - first : begin - first + length] for begin, length in rows.tolist()]
        self._note(np.concatenate(samples))
        return samples, np.array([np.isnan(one.astype(np.float64)).any() for one in samples], dtype=bool)

    def _note(self, chunk: Array) -> None:
        values = chunk.astype(np.float64).reshape(len(chunk), len(self._groups), -1 if chunk.size else 0)
        there = ~np.isnan(values)
        known = there.sum(axis=(0, 2))
        self._missing += (~there).sum(axis=(0, 2))
        mean = np.where(there, values, 0).sum(axis=(0, 2)) / np.maximum(1, known)
        squares = np.where(there, values - mean[:, None], 0) ** 2
        # Squares around the means of chunks, as those around 0 lose all digits; joined as by Chan, Golub and
        # LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
        share, change = known / np.maximum(1, self._known + known), mean - self._mean
        self._squares += squares.sum(axis=(0, 2)) + change**2 * self._known * share
        self._mean += change * share
        self._known += known
        least, most = (np.where(there, values, bound) for bound in (np.inf, -np.inf))
        self._least = np.minimum(self._least, least.min(axis=(0, 2), initial=np.inf))
        self._most = np.maximum(self._most, most.max(axis=(0, 2), initial=-np.inf))

    def described(self) -> Iterator[Values]:
        """Describe all that was read."""
        floats = stored_dtype(values_of(self._column)).kind == "f"
        for at, name in enumerate(self._groups):
            mean, least, most = (float(of[at]) for of in (self._mean, self._least, self._most))
            deviation = 0.0 if least == most else math.sqrt(self._squares[at] / max(1, self._known[at]))
            yield Values(name, mean, deviation, least, most, int(self._missing[at]), floats)


def describe(contents: Contents[Stored[Rows], Array]) -> list[PartDescription]:
    """Describe each part of a data set; each sample is read once."""
    trained: dict[bytes, bytes] = {}
    found = []
    for part, (stored, targets) in contents.parts.items():
        known = trained if part == "train" else {}
        repeated = contrary = from_training = incomplete = 0
        inputs = [_InputStatistics(one, names) for one, names in _groups(stored, contents.columns)]
        # No chunk of any input is larger than those that are read elsewhere.
        step = min(_samples_at_once(one) for one in columns_of(stored))
        for start in range(0, len(targets), step):
            goals = targets[start : start + step]
            samples, missing = zip(*[one.read(start, start + len(goals)) for one in inputs], strict=True)
            incomplete += int(np.logical_or.reduce(missing).sum())
            for *sample, target in zip(*samples, goals, strict=True):
                digest, goal = _digest(sample), target.tobytes()
                from_training += part != "train" and digest in trained
                if digest in known:
                    repeated += 1
                    contrary += known[digest] != goal
                known.setdefault(digest, goal)
        found.append(
            PartDescription(
                part,
                len(targets),
                tuple(_forms(stored)),
                tuple(values for one in inputs for values in one.described()),
                incomplete,
                _counts(targets, contents.classes),
                () if contents.classes is not None else tuple(_described(targets)),
                repeated,
                from_training,
                contrary,
            )
        )
    return found


def problems(contents: Contents[Stored[Rows], Array], parts: list[PartDescription]) -> list[str]:
    """Say what would go wrong in training, a sentence each."""
    said = []
    train, *others = parts
    for part in parts:
        if part.incomplete:
            said.append(
                f"{part.incomplete:,} of {part.samples:,} {part.name} samples have missing values: leave "
                "them out by --data.missing drop, or let means stand for them by --data.missing mean"
            )
        if part.contrary:
            said.append(
                f"{part.contrary:,} {part.name} samples have the input of another one, but another target: "
                "no model gets both right"
            )
    said += [
        f"{part.trained:,} of {part.samples:,} {part.name} samples are in the training part, too: its "
        "figures will be better than the model; take them out of one"
        for part in others
        if part.trained
    ]
    if repeated := train.repeated - train.contrary:
        said.append(
            f"{repeated:,} training {'sample is' if repeated == 1 else 'samples are'} there more than once: "
            "a validation part cut from the training part may hold what was trained on"
        )
    names = _class_names(contents, len(train.counts))
    if train.counts:
        for name, count in zip(names, train.counts, strict=True):
            if count == 0:
                said.append(f"no training sample is of class {name}")
            elif count < _RARE * max(train.counts):
                said.append(
                    f"class {name} has {count:,} training {'sample' if count == 1 else 'samples'} and the "
                    f"largest {max(train.counts):,}: "
                    "accuracy hides what the model does with it"
                )
    constant = [one.name for one in train.inputs if one.deviation == 0]
    if constant:
        said.append(f"{_first(constant)} never changes: it takes time and tells nothing")
    wide = [one for one in train.inputs if one.floats and max(abs(one.mean), one.deviation) > _WIDE]
    if wide:
        said.append(
            f"{_first([one.name for one in wide])} has the mean {wide[0].mean:.3g} and the deviation "
            f"{wide[0].deviation:.3g}: floats are given to the model as they are; bring "
            "each to mean 0 and deviation 1"
        )
    wide = [one for one in train.targets if max(abs(one.mean), one.deviation) > _WIDE]
    if wide:
        said.append(
            f"the targets have the mean {wide[0].mean:.3g} and the deviation {wide[0].deviation:.3g}: the "
            "first steps only learn that; bring them to mean 0 and deviation 1"
        )
    return said


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1:,} more)"


def _class_names(contents: Contents[Stored[Rows], Array], classes: int) -> tuple[str, ...]:
    return contents.labels or tuple(str(number) for number in range(classes))


def _groups(stored: Stored[Rows], columns: tuple[str, ...]) -> Iterator[tuple[Column[Rows], list[str]]]:
    """Yield each input, and the names of what is described on its own.

    That is each column of a table, each channel of pictures, each number of a row in a sequence; else all.
    """
    for at, column in enumerate(columns_of(stored)):
        name = _input_name(stored, at)
        values = values_of(column)
        if (values.ndim == 2 and values.shape[1] > 1) or (values.ndim == 2 and not name):
            yield (
                column,
                list(columns) or [f"{name or 'input'} {number}" for number in range(values.shape[1])],
            )
        elif values.ndim == 4 and column.values is None:
            yield column, [f"{name} channel {number}".strip() for number in range(values.shape[1])]
        else:
            yield column, [name or "all inputs"]


def _forms(stored: Stored[Rows]) -> Iterator[str]:
    """Yield the shape and the type of each input in words."""
    for at, column in enumerate(columns_of(stored)):
        name, values = _input_name(stored, at), values_of(column)
        shape = f"of shape {tuple(values.shape[1:])}"
        form = f"{shape}, {values.dtype}"
        if column.values is not None:
            lengths = column.rows[:][:, 1]
            each = "numbers" if values.ndim == 1 else f"arrays {shape}"
            form = (
                f"sequences of {int(lengths.min()):,} to {int(lengths.max()):,} {each}, "
                f"{lengths.mean():.3g} in the mean, {values.dtype}"
            )
        yield f"{name} {form}" if name else form


def _input_name(stored: Stored[Rows], at: int) -> str:
    """Return the name of an input, or its number where there are several; an only one has none."""
    if not isinstance(stored, Columns) or (len(stored.columns) == 1 and not stored.names):
        return ""
    return stored.names[at] if stored.names else f"input {at}"


def _samples_at_once(column: Column[Rows]) -> int:
    values = values_of(column)
    return max(1, samples_per_chunk(values) * len(column.rows) // max(1, len(values)))


def _described(targets: Array) -> Iterator[Values]:
    flat = targets.reshape(len(targets), -1).astype(np.float64)
    for at, column in enumerate(flat.T):
        name = "target" if flat.shape[1] == 1 else f"target {at}"
        yield Values(
            name, float(column.mean()), float(column.std()), float(column.min()), float(column.max()), 0
        )


def _counts(targets: Array, classes: int | None) -> tuple[int, ...]:
    if classes is None:
        return ()
    return tuple(np.bincount(targets[targets >= 0].reshape(-1), minlength=classes).tolist())


def _digest(sample: Sequence[Array]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for one in sample:
        if len(sample) > 1:  # else sequences of several inputs might flow into each other
            found.update(len(one).to_bytes(8, "little") if one.ndim else b"")
        found.update(np.ascontiguousarray(one).tobytes())
    return found.digest()
