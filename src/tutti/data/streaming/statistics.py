"""Sums and checks over all samples of files, made in one pass and kept beside them.

They are kept by stretches of neighbouring samples, of which each goes into one part as a whole: so the mean
of the samples that are trained on follows from them, whichever stretches a run keeps aside.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tutti.data.arrays import stored_dtype
from tutti.data.rows import Rows
from tutti.data.streaming.shards import Shard, read_no_further
from tutti.errors import BadData, NotFinite
from tutti.records.files import cache_folder, replace_file
from tutti.records.npz import npz_bytes, read_npz

_EDGE: Final = 4096
"""Bytes at either end of a file that are looked at to tell it from others."""

_LEVELS: Final = np.arange(256.0)
"""The values of 8 bits."""


@dataclass(frozen=True)
class Statistics:
    """The sums over stretches of samples.

    Attributes:
        length: the samples of a stretch; the last one may have fewer.
        sums: of 8-bit values, and of their squares, of shape (stretches, channels, 2), float64, exact; of
            other types zero.
        broken: for each stretch how many samples have NaN, inf or what the stored type cannot hold, and the
            number of the first one; of shape (stretches, 2), int64.
    """

    length: int
    sums: NDArray[np.float64]
    broken: NDArray[np.int64]

    @classmethod
    def empty(cls, rows: Rows, length: int) -> Statistics:
        """Return those of no samples yet."""
        count = -(-len(rows) // length)
        return cls(length, np.zeros((count, _channels(rows), 2)), np.zeros((count, 2), np.int64))

    def add(self, rows: Rows, stretches: slice) -> None:
        """Read some stretches of samples, once.

        Args:
            rows: all samples, as they are kept but for their type.
            stretches: their numbers.
        """
        dtype = stored_dtype(rows)
        for number in range(stretches.start, stretches.stop):
            chunk = rows[number * self.length : (number + 1) * self.length]
            if chunk.dtype == np.uint8:
                for channel in range(self.sums.shape[1]):
                    values = (chunk if self.sums.shape[1] == 1 else chunk[:, channel]).reshape(-1)
                    # Three times as fast as sums of numbers in double precision.
                    counts = torch.bincount(torch.from_numpy(values), minlength=256).double().numpy()
                    self.sums[number, channel] = counts @ _LEVELS, counts @ _LEVELS**2
            elif chunk.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    finite = np.isfinite(chunk.astype(dtype, copy=False)).reshape(len(chunk), -1).all(1)
                if not finite.all():
                    first = number * self.length + int(finite.argmin())
                    self.broken[number] = int((~finite).sum()), first

    def refuse_broken(self, part: str, rows: Rows) -> None:
        """Refuse NaN and inf.

        Raises:
            NotFinite: with the first such sample and how many there are.
        """
        count = int(self.broken[:, 0].sum())
        if count:
            first = int(self.broken[self.broken[:, 0] > 0][0, 1])
            raise NotFinite(
                f"the {part} inputs hold NaN or inf (or numbers too large for {stored_dtype(rows)}) in "
                f"{count:,} of {len(rows):,} samples, first in sample {first}; drop or replace them, such as "
                "by tutti data convert DATA NEW --data.missing drop"
            )


def _channels(rows: Rows) -> int:
    return rows.shape[1] if rows.ndim == 4 else 1


def needs_pass(rows: Rows) -> bool:
    """Tell whether samples must be looked at before they are trained on: integers are taken as they are."""
    return rows.dtype == np.uint8 or rows.dtype.kind == "f"


def load_statistics(folder: Path, part: str, rows: Rows, length: int, about: str) -> Statistics | None:
    """Return what an earlier pass has found, if it was over the same files, as `about_files` tells."""
    empty = Statistics.empty(rows, length)
    for path in _places(folder, part):
        with suppress(OSError, BadData, KeyError, ValueError):
            found = read_npz(path)
            fits = (found["sums"].shape, found["broken"].shape) == (empty.sums.shape, empty.broken.shape)
            if str(found["about"]) == about and fits:
                return Statistics(length, found["sums"], found["broken"])
    return None


def keep_statistics(folder: Path, part: str, found: Statistics, about: str) -> None:
    """Write what a pass has found beside the files, or into the cache where that cannot be.

    Args:
        folder: of the files.
        part: "train", "validation" or "test".
        found: by the pass.
        about: from `about_files` before the pass, so that files that change during it are read again.
    """
    content = npz_bytes({"about": np.array(about), "sums": found.sums, "broken": found.broken})
    for path in _places(folder, part):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
            return


def _places(folder: Path, part: str) -> list[Path]:
    name = f"statistics-{part}.npz"
    known = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return [folder / name, cache_folder() / "statistics" / known / name]


def about_files(shards: Sequence[Shard], rows: Rows, length: int) -> str:
    """Return what tells files, and the form in which they are read, from others."""
    files = []
    for shard in shards:
        with shard.path.open("rb", buffering=0) as file:
            read_no_further(file.fileno())
            edges = zlib.crc32(file.read(_EDGE))
            file.seek(max(0, shard.size - _EDGE))
            edges = zlib.crc32(file.read(_EDGE), edges)
            files.append([shard.path.name, shard.size, os.fstat(file.fileno()).st_mtime_ns, edges])
    return json.dumps({"files": files, "shape": rows.shape, "length": length, "as": str(stored_dtype(rows))})
