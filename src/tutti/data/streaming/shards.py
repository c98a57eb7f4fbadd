"""The samples in one or several NPY files, read by position."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.rows import Array, StoredRows
from tutti.errors import BadData
from tutti.records.npz import DAMAGED, open_data_file

KEPT_OPEN: Final = 64
"""The files that stay open, at most: of thousands, each is opened for every block that is read of it."""

LOOK_S: Final = 1.0
"""The seconds after which a file that is read is looked at anew: whether it is still the same."""


@dataclass(frozen=True)
class Shard:
    """An NPY file.

    Attributes:
        path: of the file.
        offset: where its values begin, in bytes.
        shape: (samples, ...).
        dtype: of a value.
        size: of the file, in bytes.
        written_ns: when it was written last.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    written_ns: int

    @classmethod
    def of(cls, path: Path) -> Shard:
        """Read the header of a file.

        Raises:
            BadData: it is missing, damaged or truncated, or cannot be read piece by piece.
        """
        with open_data_file(path) as file:
            read_no_further(file.fileno())
            try:
                version = np.lib.format.read_magic(file)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                shape, fortran, dtype = read(file)
            except (*DAMAGED, KeyError) as error:
                raise BadData(
                    f"{path} is no NPY file, or damaged: {str(error)[:200]}; copy it again"
                ) from error
            offset, about = file.tell(), os.fstat(file.fileno())
        if dtype.hasobject:
            raise BadData(
                f"{path} holds Python objects, which are not loaded because unpickling runs code; save it as "
                "numbers: array.astype('float32') or array.astype('int64')"
            )
        if fortran and len(shape) > 1:
            raise BadData(
                f"{path} has its values in Fortran's order, in which no sample is in one piece; save "
                "numpy.ascontiguousarray(array)"
            )
        if not shape:
            raise BadData(f"{path} holds a single value; give one for each sample")
        due = offset + math.prod(shape) * dtype.itemsize
        if min(shape) < 0 or about.st_size < due:
            raise BadData(
                f"{path} is truncated: it has {about.st_size:,} bytes, and {due:,} are due for {shape[0]:,} "
                "samples; copy it again"
            )
        return cls(path, offset, shape, dtype, about.st_size, about.st_mtime_ns)

    def refuse_changed(self, now: os.stat_result) -> None:
        """Refuse another content than the one whose header was read.

        Args:
            now: the file as it is now.

        Raises:
            BadData: it has been written since, or replaced.
        """
        if now.st_size < self.size:
            raise BadData(
                f"{self.path} has become shorter while it was read: it has {now.st_size:,} bytes, and had "
                f"{self.size:,}; leave the files alone while a run reads them"
            )
        if (now.st_size, now.st_mtime_ns) != (self.size, self.written_ns):
            raise BadData(
                f"{self.path} has been replaced or written to while a run reads it, so that nobody knows "
                "what was trained on; leave the files alone meanwhile"
            )


def read_no_further(file: int) -> None:
    """Have the operating system read no more of an open file than what is asked for: blocks lie anywhere."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


class ShardRows(StoredRows):
    """The samples in some NPY files, one after the other.

    They are read, not mapped: a page of a mapped file that cannot be read, as the file was cut off or the
    disk is gone, ends the process without a word, and what is mapped counts to the memory of each process
    that has seen it.

    A file that is replaced or written to meanwhile is an error: ranks and epochs would see different data.

    Args:
        shards: the files, of which all samples have one shape and one type.

    Raises:
        BadData: a file has samples of another shape or type than the first.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)
        first = self.shards[0]
        for shard in self.shards:
            if (shard.shape[1:], shard.dtype) != (first.shape[1:], first.dtype):
                raise BadData(
                    f"{shard.path} has samples of the shape {shard.shape[1:]} and type {shard.dtype}, "
                    f"{first.path} of {first.shape[1:]} and {first.dtype}; all files of an array need "
                    "the same"
                )
        self._ends = list(accumulate(shard.shape[0] for shard in self.shards))
        self._each = math.prod(first.shape[1:]) * first.dtype.itemsize
        self._files: dict[int, int] = {}
        self._looked: dict[int, float] = {}
        super().__init__((self._ends[-1], *first.shape[1:]), first.dtype, self._read_samples)

    @classmethod
    def of(cls, paths: Sequence[Path]) -> ShardRows:
        """Read the headers of some files.

        Raises:
            BadData: a file is missing or broken, or has other samples than the first.
        """
        return cls([Shard.of(path) for path in paths])

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    @override
    def __reduce__(self) -> tuple[type[ShardRows], tuple[list[Shard]]]:
        # Open files belong to a process.
        return ShardRows, (self.shards,)

    def _read_samples(self, start: int, stop: int) -> Array:
        found = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        self.read_into(start, found)
        return found

    def read_into(self, start: int, found: Array) -> None:
        """Read samples from number `start` on, as many as `found` has, in the type of the files.

        Raises:
            BadData: a file ends before them, or cannot be read.
        """
        stop, content = start + len(found), found.reshape(-1).view(np.uint8).data
        for number in range(bisect_right(self._ends, start), len(self.shards)):
            begin = self._ends[number] - self.shards[number].shape[0]
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, self._ends[number])
            piece = content[(low - start) * self._each : (high - start) * self._each]
            self._read_bytes(number, self.shards[number].offset + (low - begin) * self._each, piece)

    def expect(self, start: int, stop: int) -> None:
        """Have the operating system begin to read some samples, which are wanted soon."""
        for number in range(bisect_right(self._ends, start), len(self.shards)):
            begin = self._ends[number] - self.shards[number].shape[0]
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, self._ends[number])
            offset = self.shards[number].offset + (low - begin) * self._each
            with self._opened(number) as file:
                os.posix_fadvise(file, offset, (high - low) * self._each, os.POSIX_FADV_WILLNEED)

    def _read_bytes(self, number: int, offset: int, content: memoryview) -> None:
        shard, done = self.shards[number], 0
        with self._opened(number) as file:
            while done < len(content):
                try:
                    count = os.preadv(file, [content[done:]], offset + done)
                except OSError as error:
                    raise BadData(
                        f"{shard.path} cannot be read any more ({error.strerror}): is its disk still there?"
                    ) from error
                if count == 0:
                    shard.refuse_changed(os.fstat(file))
                    raise BadData(f"{shard.path} ends before its time; copy it again")
                done += count

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        """Open a file, unless it is, and look at whether it is the same.

        Raises:
            BadData: it is not, or cannot be opened.
        """
        file = self._files.get(number)
        if file is None:
            file = self._open(number)
        elif time.monotonic() - self._looked[number] > LOOK_S:
            self._look(number)
        try:
            yield file
        finally:
            if self._files.get(number) != file:
                os.close(file)

    def _open(self, number: int) -> int:
        shard = self.shards[number]
        with _refusing(shard):
            file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            shard.refuse_changed(os.fstat(file))
            read_no_further(file)
        except BaseException:
            os.close(file)
            raise
        if len(self._files) < KEPT_OPEN:
            self._looked[number] = time.monotonic()
            self._files.setdefault(number, file)  # A thread of this process may have been faster.
        return file

    def _look(self, number: int) -> None:
        shard, self._looked[number] = self.shards[number], time.monotonic()
        with _refusing(shard):
            now = os.stat(shard.path)
        shard.refuse_changed(now)


@contextmanager
def _refusing(shard: Shard) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadData(
            f"{shard.path} cannot be opened any more ({error.strerror}); leave the files alone while a run "
            "reads them"
        ) from error
