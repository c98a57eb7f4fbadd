"""Readers of data files: IDX (plain or gzip) and NPZ. Errors name the file and the bytes that are wrong."""

from __future__ import annotations

import gzip
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from tutti.errors import BadData
from tutti.records.untrusted import open_file

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK"

Array = NDArray[Any]

_NPY_HEADERS = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}
"""The readers of an array's header, by the version of its format."""

_DAMAGED = (
    *(zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, KeyError, TypeError),
    *(NotImplementedError, RuntimeError, MemoryError, OverflowError, struct.error, SyntaxError, TokenError),
)
"""The errors of zipfile and NumPy for archives that are none, or were made to harm."""

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_start(path: Path, count: int = 4) -> bytes:
    """Read the first bytes of a file.

    Raises:
        BadData: the file cannot be opened, or it is empty.
    """
    with _open(path) as file:
        start = file.read(count)
    if not start:
        raise BadData(f"{path} is empty (0 bytes); copy or download it again")
    return start


def read_idx(path: Path) -> Array:
    """Read the array in an IDX file, gzip-compressed or not (its first bytes tell, not its name).

    Source: the format is described at the end of http://yann.lecun.com/exdb/mnist/.

    Raises:
        BadData: the file is missing, empty, truncated, too long, or no IDX file.
    """
    packed = read_start(path).startswith(GZIP_MAGIC)
    with _open(path) as raw, _unpacked(path, raw) if packed else nullcontext(raw) as file:
        start = file.read(4)
        if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _IDX_TYPES or start[3] == 0:
            raise BadData(
                f"{path} is no IDX file: it begins with the bytes {_hex(start)}, where an IDX file has 00 "
                "00, its type (08 for bytes) and its number of dimensions; give an IDX, IDX.gz or NPZ file"
            )
        dtype, dimensions = np.dtype(_IDX_TYPES[start[2]]), start[3]
        lengths = file.read(4 * dimensions)
        header = len(start) + 4 * dimensions
        if len(lengths) < 4 * dimensions:
            raise BadData(
                f"{path} is truncated: {len(start) + len(lengths)} bytes, where its header alone has "
                f"{header}; copy it again"
            )
        shape = tuple(int(n) for n in np.frombuffer(lengths, ">u4"))
        nbytes = math.prod(shape) * dtype.itemsize
        there = None if packed else os.fstat(raw.fileno()).st_size
        if there is None or there == header + nbytes:
            _refuse_larger_than_memory(path, nbytes)
            content = file.read(nbytes)
            there = header + len(content) + len(file.read(1))
    if there != header + nbytes:
        state = "truncated" if there < header + nbytes else "too long"
        raise BadData(
            f"{path} is {state}: {there:,} bytes, where its header (shape {shape}, {dtype.itemsize} "
            f"bytes per value) asks for {header + nbytes:,}; copy or download it again"
        )
    values = np.frombuffer(content, dtype).reshape(shape)
    return values if dtype.itemsize == 1 else values.astype(dtype.newbyteorder("="))


def read_npz(path: Path) -> dict[str, Array]:
    """Read the arrays in an NPZ file by key. Nothing is unpickled.

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
        with _open(path) as raw, zipfile.ZipFile(raw) as archive:
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
    _refuse_larger_than_memory(path, sum(member.file_size for member in archive.infolist()))
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


def _open(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        BadData: it cannot be opened, or is a pipe or a device.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise BadData(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions"
        ) from error


@contextmanager
def _unpacked(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    """Open the content of a gzip file; errors name the file."""
    try:
        with gzip.open(raw) as file:
            yield cast("BinaryIO", file)
    except EOFError as error:
        size = path.stat().st_size
        raise BadData(
            f"{path} is truncated: its {size:,} bytes of gzip data end too early; copy or download it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadData(f"{path} is damaged: {error}; copy or download it again") from error


def _refuse_larger_than_memory(path: Path, nbytes: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise BadData(
            f"{path} holds {nbytes:,} bytes of data, and this machine has {memory:,} bytes of memory; give a "
            "part of it, or a factory of a data set that reads samples when they are needed"
        )


def _hex(start: bytes) -> str:
    return start[:4].hex(" ")
