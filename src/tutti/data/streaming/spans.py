"""The samples of a file that are those of a part: stretches of neighbours, far fewer than samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tutti.data.rows import Indices
from tutti.errors import BadData

STRETCH_BYTES: Final = 1 << 20
"""The largest stretch that goes into one part as a whole: less would be slow to read on its own."""

_FEWEST: Final = 1000
"""Stretches that data are cut into, at least, if they have as many samples."""


@dataclass(frozen=True)
class Spans:
    """The samples of a part, as stretches of the source's.

    Attributes:
        starts: where each stretch begins, ascending, int64.
        lengths: of the stretches, above 0, int64.
    """

    starts: Indices
    lengths: Indices

    @classmethod
    def whole(cls, samples: int) -> Spans:
        """Return all samples as one stretch."""
        return cls(np.array([0]), np.array([samples]))

    @cached_property
    def _ends(self) -> Indices:
        return self.lengths.cumsum()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self.lengths) else 0

    def rows(self, positions: Indices) -> Indices:
        """Return the source's numbers of the samples at some positions of the part."""
        at = self._ends.searchsorted(positions, "right")
        return self.starts[at] + positions - (self._ends[at] - self.lengths[at])

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the source's numbers, from one up to another, of the positions from `start` to `stop`."""
        at = int(self._ends.searchsorted(start, "right"))
        while start < stop:
            end = int(self._ends[at])
            row = int(self.starts[at]) + start - (end - int(self.lengths[at]))
            count = min(stop, end) - start
            yield row, row + count
            start, at = start + count, at + 1

    def between(self, start: int, stop: int) -> Spans:
        """Return the part's samples at the positions from `start` to `stop`."""
        found = np.array(list(self.stretches(start, stop)), np.int64).reshape(-1, 2)
        return Spans(found[:, 0], found[:, 1] - found[:, 0])


def stretch_length(samples: int, sample_bytes: int) -> int:
    """Return the samples of a stretch."""
    return max(1, min(STRETCH_BYTES // max(1, sample_bytes), samples // _FEWEST))


def split_stretches(samples: int, length: int, share: float, seed: int) -> tuple[Spans, Spans]:
    """Choose stretches to train on and stretches kept aside.

    Whole stretches, as reading a tenth of the samples one by one would read nearly all of the disk.

    Args:
        samples: how many there are.
        length: the samples of a stretch; the last one may have fewer.
        share: of the stretches to be kept aside, 0 to below 1.
        seed: decides which.

    Returns:
        The samples that are trained on, and those kept aside.

    Raises:
        BadData: one of the parts would be empty.
    """
    count = -(-samples // length)
    trained = np.ones(count, dtype=bool)
    wanted = round(share * count)
    if share and wanted in (0, count):
        empty = "validation" if wanted == 0 else "training"
        raise BadData(
            f"a validation share of {share} of {samples:,} samples leaves {empty} without any; use "
            "'--validation 0' for none, or a share that leaves both some"
        )
    trained[np.random.default_rng((seed, 0x5EED)).permutation(count)[:wanted]] = False
    return _spans(trained, length, samples), _spans(~trained, length, samples)


def _spans(chosen: NDArray[np.bool_], length: int, samples: int) -> Spans:
    edges = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]]))
    starts, stops = np.flatnonzero(edges == 1) * length, np.flatnonzero(edges == -1) * length
    return Spans(starts, np.minimum(stops, samples) - starts)
