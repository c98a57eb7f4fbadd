"""A data set described: what is in its parts, and what would go wrong in training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from tutti.data.arrays import chunks_of, stored_dtype
from tutti.data.columns import Columns, Stored
from tutti.data.contents import Contents
from tutti.data.rows import Array, Rows
from tutti.errors import BadData

_RARE: Final = 0.1
"""A class is rare if it has less than this share of the samples of the largest one."""

_WIDE: Final = 10.0
"""Floats of a larger mean or deviation train badly unless they are scaled."""


@dataclass(frozen=True)
class Values:
    """What the values of one input, channel or target are like; NaN is left out.

    Attributes:
        name: of the column, or of the channel.
        mean: of them.
        deviation: from it.
        least: the smallest.
        most: the largest.
        missing: how many are NaN.
    """

    name: str
    mean: float
    deviation: float
    least: float
    most: float
    missing: int


@dataclass(frozen=True)
class PartDescription:
    """What is in one part of a data set.

    Attributes:
        name: "train", "validation" or "test".
        samples: how many.
        shape: of one input.
        dtype: of the inputs, as the source has them.
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
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[Values, ...]
    incomplete: int
    counts: tuple[int, ...]
    targets: tuple[Values, ...]
    repeated: int
    trained: int
    contrary: int


def in_one_array(contents: Contents[Stored[Rows], Array]) -> Contents[Rows, Array]:
    """Return a data set with one input of one shape, which is what can be described.

    Raises:
        BadData: it has several, or sequences.
    """
    parts = {}
    for part, (inputs, targets) in contents.parts.items():
        if isinstance(inputs, Columns):
            names = f": {', '.join(inputs.names)}" if inputs.names else ""
            raise BadData(
                f"{contents.name} has several inputs, or sequences of unequal length{names}; 'tutti data' "
                "takes only data with one input of one shape: give these to 'tutti train' as they are"
            )
        parts[part] = inputs, targets
    return replace(cast("Contents[Rows, Array]", contents), parts=parts)


def describe(contents: Contents[Rows, Array]) -> list[PartDescription]:
    """Describe each part of a data set; each sample is read once."""
    trained: dict[bytes, bytes] = {}
    found = []
    for part, (inputs, targets) in contents.parts.items():
        known = trained if part == "train" else {}
        repeated = contrary = from_training = incomplete = 0
        groups = _groups(inputs, contents.columns)
        sums = np.zeros((len(groups), 2))
        least, most = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
        missing = np.zeros(len(groups), np.int64)
        for start, chunk in chunks_of(inputs):
            for sample, target in zip(chunk, targets[start : start + len(chunk)], strict=True):
                digest, goal = _digest(sample), target.tobytes()
                from_training += part != "train" and digest in trained
                if digest in known:
                    repeated += 1
                    contrary += known[digest] != goal
                known.setdefault(digest, goal)
            values = chunk.astype(np.float64).reshape(len(chunk), len(groups), -1)
            there = ~np.isnan(values)
            incomplete += int((~there).any(axis=(1, 2)).sum())
            missing += (~there).sum(axis=(0, 2))
            sums += np.stack([np.where(there, values**power, 0).sum(axis=(0, 2)) for power in (1, 2)], axis=1)
            least = np.minimum(least, np.where(there, values, np.inf).min(axis=(0, 2)))
            most = np.maximum(most, np.where(there, values, -np.inf).max(axis=(0, 2)))
        count = inputs.size // len(groups) - missing
        found.append(
            PartDescription(
                part,
                len(inputs),
                tuple(inputs.shape[1:]),
                str(inputs.dtype),
                tuple(_values(groups, sums, least, most, count, missing)),
                incomplete,
                _counts(targets, contents.classes),
                () if contents.classes is not None else tuple(_described(targets)),
                repeated,
                from_training,
                contrary,
            )
        )
    return found


def problems(contents: Contents[Rows, Array], parts: list[PartDescription]) -> list[str]:
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
    if stored_dtype(contents.parts["train"][0]).kind == "f":
        wide = [one for one in train.inputs if max(abs(one.mean), one.deviation) > _WIDE]
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


def _class_names(contents: Contents[Rows, Array], classes: int) -> tuple[str, ...]:
    return contents.labels or tuple(str(number) for number in range(classes))


def _groups(inputs: Rows, columns: tuple[str, ...]) -> list[str]:
    """The names of what is described on its own: columns of a table, channels of pictures, or all inputs."""
    if inputs.ndim == 2:
        return list(columns) or [f"input {number}" for number in range(inputs.shape[1])]
    if inputs.ndim == 4:
        return [f"channel {number}" for number in range(inputs.shape[1])]
    return ["all inputs"]


def _values(
    names: list[str],
    sums: NDArray[np.float64],
    least: NDArray[np.float64],
    most: NDArray[np.float64],
    count: NDArray[np.int64],
    missing: NDArray[np.int64],
) -> Iterator[Values]:
    for at, name in enumerate(names):
        mean, squares = sums[at] / max(1, count[at])
        deviation = 0.0 if least[at] == most[at] else math.sqrt(max(0.0, squares - mean**2))
        yield Values(name, float(mean), deviation, float(least[at]), float(most[at]), int(missing[at]))


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


def _digest(sample: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(sample).tobytes(), digest_size=16).digest()
