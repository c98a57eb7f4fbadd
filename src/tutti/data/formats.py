"""Readers of data files: IDX (plain or gzip) and NPZ. Errors name the file and the bytes that are wrong."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK"

Array = NDArray[Any]

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_start(path: Path, count: int = 4) -> bytes:
    """The first bytes of a file.

    Raises:
        BadData: the file cannot be opened, or it is empty.
    """
    try:
        with path.open("rb") as file:
            start = file.read(count)
    except OSError as error:
        raise BadData(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error
    if not start:
        raise BadData(f"{path} is empty (0 bytes); copy or download it again")
    return start


def read_idx(path: Path) -> Array:
    """The array in an IDX file, gzip-compressed or not (its first bytes tell, not its name).

    Source: the format is described at the end of http://yann.lecun.com/exdb/mnist/.

    Raises:
        BadData: the file is missing, empty, truncated, too long, or no IDX file.
    """
    content = _unzipped(path) if read_start(path).startswith(GZIP_MAGIC) else path.read_bytes()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or content[3] == 0:
        raise BadData(
            f"{path} is no IDX file: it begins with the bytes {_hex(content)}, where an IDX file has 00 00, "
            f"its type (08 for bytes) and its number of dimensions; give an IDX, IDX.gz or NPZ file"
        )
    dtype, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise BadData(
            f"{path} is truncated: {len(content)} bytes, where its header alone has {header}; copy it again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise BadData(
            f"{path} is {state}: {len(content):,} bytes, where its header (shape {shape}, {dtype.itemsize} "
            f"bytes per value) asks for {expected:,}; copy or download it again"
        )
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values if dtype.itemsize == 1 else values.astype(dtype.newbyteorder("="))


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays in an NPZ file by key. Nothing is unpickled.

    Raises:
        BadData: the file is missing, empty, truncated, no NPZ file, or holds Python objects.
    """
    start = read_start(path)
    if not start.startswith(ZIP_MAGIC):
        raise BadData(
            f"{path} is no NPZ file: it begins with the bytes {_hex(start)}, expected 'PK'; see numpy.savez"
        )
    arrays: dict[str, Array] = {}
    try:
        # numpy leaves a file that it opened itself open when it is no whole archive.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            for key in file.files:
                arrays[key] = _npz_array(path, key, file)
    except (zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        size = path.stat().st_size
        raise BadData(f"{path} is truncated or damaged ({size:,} bytes): {error}; copy it again") from error
    return arrays


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


def _unzipped(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except EOFError as error:
        size = path.stat().st_size
        raise BadData(
            f"{path} is truncated: its {size:,} bytes of gzip data end too early; copy or download it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadData(f"{path} is damaged: {error}; copy or download it again") from error


def _hex(start: bytes) -> str:
    return start[:4].hex(" ")
