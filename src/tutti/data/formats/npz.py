"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from tutti.data.arrays import Array
from tutti.data.contents import Contents, from_keys
from tutti.data.formats import open_data_file, refuse_larger_than_memory
from tutti.errors import BadData
from tutti.registry import part

_NPY_HEADERS = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}
"""The readers of an array's header, by the version of its format."""

_DAMAGED = (
    *(zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, KeyError, TypeError),
    *(NotImplementedError, RuntimeError, MemoryError, OverflowError, struct.error, SyntaxError, TokenError),
)
"""The errors of zipfile and NumPy for archives that are none, or were made to harm."""


@part("NPZ")
class Npz:
    """NPZ files, as of `numpy.savez`."""

    start = b"PK"

    @staticmethod
    def read(path: Path) -> Contents[object]:
        """Read the data set in an NPZ file, whose keys are those of a dict."""
        return from_keys(read_npz(path), path.stem, str(path))


def read_npz(path: Path) -> dict[str, Array]:
    """Read the arrays in an NPZ file by key. Nothing is unpickled.

    Raises:
        BadData: the file is missing, empty, truncated, no NPZ file, or holds Python objects.
    """
    arrays: dict[str, Array] = {}
    try:
        # numpy leaves a file that it opened itself open when it is no whole archive.
        with open_data_file(path) as raw, zipfile.ZipFile(raw) as archive:
            _refuse_false_sizes(path, archive)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                for key in file.files:
                    arrays[key] = _npz_array(path, key, file)
    except _DAMAGED as error:
        size = path.stat().st_size
        said = str(error)[:200]
        raise BadData(f"{path} is truncated or damaged ({size:,} bytes): {said}; copy it again") from error
    return arrays


def _refuse_false_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose arrays do not fit into memory, or say that they are larger than they are.

    NumPy makes room for what an array says before it reads it.
    """
    refuse_larger_than_memory(path, sum(member.file_size for member in archive.infolist()))
    for member in archive.infolist():
        with archive.open(member) as file:
            reader = _NPY_HEADERS.get(read_magic(file)) if member.filename.endswith(".npy") else None
            if reader is None:
                continue
            shape, _, dtype = reader(file)
            nbytes = math.prod(shape) * dtype.itemsize
            if not dtype.hasobject and file.tell() + nbytes != member.file_size:
                raise BadData(
                    f"{path} is damaged in its array '{member.filename.removesuffix('.npy')}': its header "
                    f"asks for {nbytes:,} bytes, and {member.file_size - file.tell():,} are there; copy it "
                    "again"
                )


def _npz_array(path: Path, key: str, file: Any) -> Array:
    try:
        value = file[key]
    except ValueError as error:
        if "pickle" not in str(error):
            raise BadData(f"{path} is damaged in its array '{key}': {error}; copy it again") from error
        raise BadData(
            f"{path} holds Python objects in its array '{key}', which are not loaded because unpickling "
            f"runs code; save it as numbers: array.astype('float32') or array.astype('int64')"
        ) from error
    if not isinstance(value, np.ndarray):
        raise BadData(f"{path} holds a file '{key}' that is no NumPy array; write it with numpy.savez")
    return value
