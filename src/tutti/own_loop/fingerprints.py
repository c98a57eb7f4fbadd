"""Fingerprints of data sets and batches: a few numbers by which ranks compare their data.

All of the indices of a subset are looked at, and a few samples of what is in memory; nothing is read from
files, and no sample is made.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import PurePath
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from tutti.own_loop.structure import values_in

MOST: Final = 64
"""Samples that are looked at, and numbers of each of them, evenly spread."""

DEEPEST: Final = 8
"""The depth to which data sets and samples may be nested."""

ROUNDING: Final = 1e-4
"""The difference allowed between the sums of two ranks, as a share of the sum of absolute values.

Hosts with other processors round otherwise what their programs make of the data. Samples in another order are
some 1e-2 apart.
"""

SAMPLES: Final = (Tensor, np.ndarray, list, tuple)
"""Types of what has an item for each sample."""

Looked = MutableMapping[object, bool]
"""Data sets whose samples have been looked at before: they may have been changed by being used."""


def fingerprint(length: int, data: Any, looked: Looked) -> list[int]:
    """Return the fingerprint of a data set or batch, as integers of 64 bits.

    Args:
        length: how many samples there are; -1: nobody knows.
        data: a data set with samples by number, or samples.
        looked: data sets whose samples are left out now; this one and those inside it are added.

    Returns:
        The length, a checksum of what is exact, a weighted sum of numbers with fractions, and the sum of
        their absolute values.
    """
    check, numbers = 0, [np.zeros(0)]
    listed = isinstance(data, SAMPLES)
    for part in _parts_of(data, looked, DEEPEST) if listed else _parts_of_dataset(data, looked, DEEPEST):
        if isinstance(part, bytes):
            check = crc32(part, check)
        else:
            numbers.append(np.nan_to_num(part.reshape(-1), posinf=0.0, neginf=0.0))
    values = np.concatenate(numbers)
    sums = [values @ np.cos(np.arange(1, len(values) + 1)), np.abs(values).sum()]
    return [length, check, *np.array(sums).view(np.int64).tolist()]


def are_alike(one: list[int], other: list[int]) -> bool:
    """Return whether two fingerprints may be of the same samples in the same order."""
    (total, size), (total_, size_) = (
        np.array(words[2:4], np.int64).view(np.float64) for words in (one, other)
    )
    most = ROUNDING * max(size, size_)
    return one[:2] == other[:2] and bool(abs(total - total_) <= most and abs(size - size_) <= most)


def length_of(value: Any) -> int:
    """Return how many samples there are; -1: nobody knows."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return -1


def _parts_of(value: Any, looked: Looked, depth: int) -> Iterator[bytes | np.ndarray[Any, Any]]:
    """Yield what there is to compare: arrays of float64, and all else as bytes."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_meta:
            few = (_some(value) if value.dim() else value).detach().cpu()
            yield from _parts_of((few.double() if few.is_floating_point() else few).numpy(), looked, depth)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        rows = _some(np.atleast_1d(np.asarray(value)))
        flat = rows.reshape(len(rows), -1) if rows.size else rows
        few = flat[..., :: max(1, flat.shape[-1] // MOST)] if rows.size else rows
        if value.dtype.kind == "c":
            few = np.stack([few.real, few.imag])
        yield few.astype(np.float64) if value.dtype.kind in "fc" else few.astype(np.int64).tobytes()
    elif isinstance(value, int | float):
        yield from _parts_of(np.asarray(value), looked, depth)
    elif isinstance(value, str | PurePath):  # ranks may have their files in folders of their own
        yield PurePath(value).name.encode("utf-8", "surrogatepass")
    elif depth and isinstance(value, Dataset):
        yield from _parts_of_dataset(value, looked, depth)
    elif depth:
        if isinstance(value, list | tuple):
            yield str(len(value)).encode()
        for item in _some(list(values_in(value))):
            yield from _parts_of(item, looked, depth - 1)


def _parts_of_dataset(dataset: Any, looked: Looked, depth: int) -> Iterator[bytes | np.ndarray[Any, Any]]:
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices).tobytes()
    new, length = _is_new(dataset, looked) and not isinstance(dataset, Subset), length_of(dataset)
    for value in getattr(dataset, "__dict__", {}).values():
        for part in (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        ):
            first = part[0] if isinstance(part, list) and part else part
            if isinstance(first, Dataset) or (
                new and isinstance(part, SAMPLES) and length_of(part) == length
            ):
                yield from _parts_of(part, looked, depth - 1)


def _is_new(dataset: Any, looked: Looked) -> bool:
    try:
        new = dataset not in looked
        looked[dataset] = True
    except TypeError:  # nothing can refer to it weakly
        return True
    return new


def _some(samples: Any) -> Any:
    return samples[:: max(1, len(samples) // MOST)]
