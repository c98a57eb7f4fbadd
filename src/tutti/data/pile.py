"""Samples gathered piece by piece, which need little memory however many they are."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from tutti.data.rows import Array, Rows, StoredRows, joined
from tutti.errors import BadData
from tutti.records.files import cache_folder
from tutti.records.npz import refuse_larger_than_memory

_MOST_KEPT: Final = 1 << 26
"""Bytes that are kept in memory; what comes after them goes into a file."""

_AT_ONCE: Final = 1 << 22
"""Bytes that are unpacked at a time."""


class Pile:
    """Samples added in pieces, of one shape: the first in memory, all others in a file without a name.

    The file is in the cache (`TUTTI_CACHE`, or `~/.cache/tutti`), and gone when nobody needs it any more.

    Args:
        source: the file that the samples are from, for messages.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._pieces: list[Rows] = []
        self._nbytes = 0
        self._file: _File | None = None

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self._pieces[0].shape[1:]

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """The types of its pieces."""
        return {piece.dtype for piece in self._pieces}

    def add(self, piece: Array) -> None:
        """Add samples.

        Raises:
            BadData: all together do not fit into memory, where they end up, or the disk is full.
        """
        self._nbytes += piece.nbytes
        refuse_larger_than_memory(self._source, self._nbytes)
        if self._nbytes <= _MOST_KEPT:
            self._pieces.append(piece)
            return
        try:
            self._file = self._file or _File(cache_folder())
            self._pieces.append(self._file.stored(piece))
        except OSError as error:
            raise BadData(
                f"the samples of {self._source} cannot be kept in {cache_folder()}: "
                f"{error.strerror or error}; set TUTTI_CACHE to a folder that has room"
            ) from error

    def rows(self, dtype: np.dtype[Any] | None = None) -> Rows:
        """Return all samples, of one type."""
        return joined(self._pieces, dtype)


class _File:
    """A file without a name, closed when nobody reads from it any more."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._number, name = tempfile.mkstemp(dir=folder, prefix="samples-")
        weakref.finalize(self, os.close, self._number)
        os.unlink(name)
        self._end = 0

    def stored(self, piece: Array) -> StoredRows:
        """Write samples, and return what reads them."""
        # What reads them must not keep them: it knows their shape alone.
        shape, dtype = piece.shape, piece.dtype
        begin, each = self._end, piece.nbytes // max(1, len(piece))
        content = memoryview(piece.tobytes())
        self._end += len(content)
        while content:
            content = content[os.write(self._number, content) :]

        def read(start: int, stop: int) -> Array:
            stored = os.pread(self._number, (stop - start) * each, begin + start * each)
            return np.frombuffer(stored, dtype).reshape(-1, *shape[1:])

        return StoredRows(shape, dtype, read)


def gathered(source: Path, file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
    """Gather an array from what is unpacked, piece by piece.

    Args:
        source: the file that it is from, for messages.
        file: whose next bytes are the array.
        shape: of the array, (samples, ...).
        dtype: of its values; the result has it in the order of bytes of this machine.

    Raises:
        BadData: there is no room.
        EOFError: the file ends before the array.
    """
    pile, each = Pile(source), math.prod(shape[1:]) * dtype.itemsize
    at_once, native = max(1, _AT_ONCE // max(1, each)), dtype.newbyteorder("=")
    for start in range(0, shape[0], at_once):
        count = min(at_once, shape[0] - start)
        content = file.read(count * each)
        if len(content) < count * each:
            raise EOFError("it ends too early")
        piece = np.frombuffer(content, dtype).reshape(count, *shape[1:])
        pile.add(piece.astype(native, copy=False))
    return pile.rows() if len(pile) else np.empty(shape, native)
