"""Fingerprints of data sets and batches: a few numbers by which ranks compare their data.

All of the indices of a subset are looked at, and a few samples of what is in memory; nothing is read from
files, and no sample is made.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Final, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from tutti.own_loop.structure import values_in

ROWS: Final = 64
"""Samples that are looked at, evenly spread."""

VALUES: Final = 64
"""Numbers that are looked at of each of them, evenly spread."""

DEEPEST: Final = 8
"""The depth to which data sets may be nested."""

ROUNDING: Final = 1e-4
"""The difference allowed between the sums of two ranks, as a share of the sum of absolute values.

Hosts with other processors round otherwise what their programs make of the data. Samples in another order are
some 1e-2 apart.
"""


@dataclass
class Fingerprint:
    """A fingerprint of data.

    Attributes:
        length: how many samples there are.
        check: a checksum of indices, numbers without fractions, and text.
        total: a weighted sum of numbers with fractions.
        size: the sum of their absolute values.
    """

    length: int = -1
    check: int = 0
    total: float = 0.0
    size: float = 0.0

    def __post_init__(self) -> None:
        self._numbers = 0

    def words(self) -> list[int]:
        """All of it, as integers of 64 bits."""
        return [self.length, self.check, *np.array([self.total, self.size]).view(np.int64).tolist()]

    @classmethod
    def of_words(cls, words: Sequence[int]) -> Fingerprint:
        """The fingerprint that `words` gave."""
        total, size = np.array(words[2:4], dtype=np.int64).view(np.float64).tolist()
        return cls(words[0], words[1], total, size)

    def is_like(self, other: Fingerprint) -> bool:
        """Return whether both may be of the same samples in the same order."""
        most = ROUNDING * max(self.size, other.size)
        close = abs(self.total - other.total) <= most and abs(self.size - other.size) <= most
        return close and (self.length, self.check) == (other.length, other.check)

    def note(self, value: object, depth: int = DEEPEST) -> None:
        """Take in a value, or some of its parts; what is of no type that is known here is left out."""
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self._note_tensor(torch.as_tensor(np.ascontiguousarray(_some(value))))
        elif isinstance(value, bool | int | np.integer):
            self._note_bytes(str(int(value)).encode())
        elif isinstance(value, float):
            self._note_numbers(torch.tensor([value]))
        elif isinstance(value, str | PurePath):
            # Ranks may have their files in folders of their own.
            self._note_bytes(PurePath(value).name.encode("utf-8", "surrogatepass"))
        elif isinstance(value, list | tuple) and depth:
            self._note_bytes(str(len(value)).encode())
            for item in _some(value):
                self.note(item, depth - 1)
        elif depth:
            for item in values_in(value):
                self.note(item, depth - 1)

    def note_indices(self, indices: Sequence[int]) -> None:
        """Take in all indices of a subset."""
        numbers = np.asarray(indices)
        if numbers.dtype.kind in "iu":
            self._note_bytes(np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
        else:
            self.note(list(indices))

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        rows = cast("Tensor", _some(tensor.detach())) if tensor.dim() else tensor.detach().view(1)
        flat = rows.reshape(len(rows), prod(rows.shape[1:]))
        flat = flat[:, :: max(1, flat.shape[1] // VALUES)].cpu()
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        if flat.is_floating_point():
            self._note_numbers(flat)
        else:
            self._note_bytes(flat.to(torch.int64).contiguous().numpy().tobytes())

    def _note_numbers(self, numbers: Tensor) -> None:
        values = numbers.double().reshape(-1).nan_to_num(0.0, 0.0, 0.0)
        places = torch.arange(self._numbers + 1, self._numbers + 1 + len(values), dtype=torch.float64)
        self.total += float(values @ places.cos())
        self.size += float(values.abs().sum())
        self._numbers += len(values)

    def _note_bytes(self, data: bytes) -> None:
        self.check = crc32(data, self.check)


Looked = MutableMapping[object, bool]
"""Data sets whose samples have been looked at before."""


def of_dataset(dataset: object, looked: Looked) -> Fingerprint:
    """The fingerprint of a data set.

    Args:
        dataset: with samples by number.
        looked: data sets whose samples are left out now, as they may have been changed by being used, such as
            those that keep what they have read; this one and those inside it are added.
    """
    found = Fingerprint(_length(dataset))
    _note_dataset(found, dataset, looked, DEEPEST)
    return found


def _note_dataset(found: Fingerprint, dataset: object, looked: Looked, depth: int) -> None:
    if isinstance(dataset, list | tuple | Tensor | np.ndarray):
        found.note(dataset)
        return
    if isinstance(dataset, Subset):
        found.note_indices(dataset.indices)
    attributes: dict[str, object] = getattr(dataset, "__dict__", {})
    new = _is_new(dataset, looked)
    for value in attributes.values():
        for part in _datasets_in(value) if depth else ():
            _note_dataset(found, part, looked, depth - 1)
        if new and not isinstance(dataset, Subset):
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor | np.ndarray | list | tuple) and _length(part) == _length(dataset):
                    found.note(part)


def _is_new(dataset: object, looked: Looked) -> bool:
    try:
        new = dataset not in looked
        looked[dataset] = True
    except TypeError:  # nothing can refer to it weakly
        return True
    return new


def _datasets_in(value: object) -> list[object]:
    if isinstance(value, Dataset):
        return [value]
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        # Data sets that are made of others have a few of them, and no list of samples begins with one.
        if isinstance(next(iter(parts), None), Dataset):
            return [part for part in parts if isinstance(part, Dataset)]
    return []


def _length(value: object) -> int:
    try:
        return len(value)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return -1


def _some(samples: Sequence[object] | Tensor | np.ndarray) -> Sequence[object] | Tensor | np.ndarray:
    return samples[:: max(1, len(samples) // ROWS)]
