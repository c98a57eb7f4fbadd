"""NPZ files, which are archives of NumPy arrays by key. Nothing is unpickled. Needs no torch."""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from tutti.errors import BadData
from tutti.records.texts import printable

Array = NDArray[Any]

DAMAGED = (
    *(zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, KeyError, TypeError),
    *(NotImplementedError, RuntimeError, MemoryError, OverflowError, struct.error, SyntaxError, TokenError),
)
"""The errors of zipfile and NumPy for archives that are none, or were made to harm."""


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return the content of an NPZ file: the same for the same arrays."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def read_npz(path: Path, keys: Collection[str] | None = None) -> dict[str, Array]:
    """Read the arrays in an NPZ file by key. Nothing is unpickled."""
    try:
        with open_data_file(path) as raw, NpzFile(raw) as file:
            return {name: file[name] for name in file.files if keys is None or name in keys}
    except DAMAGED as error:
        raise damaged(path, error) from error


def open_data_file(path: Path) -> BinaryIO:
    """Open a file for reading."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BadData(f"{path} is a pipe, a socket or a device; give a file")
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadData(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


def damaged(path: Path, error: Exception) -> BadData:
    """Return the error for a file that is truncated or damaged, or has pickles, in one line."""
    if "pickle" in str(error) or "Python objects" in str(error):
        return BadData(
            f"{path} holds Python objects, which are not loaded because unpickling runs code; save numbers: "
            "array.astype('float32') or array.astype('int64')"
        )
    size = path.stat().st_size
    reason = printable(" ".join(str(error)[:200].split()))
    return BadData(f"{path} is truncated or damaged ({size:,} bytes): {reason}; copy it again")
