"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

import math
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO, Final

import numpy as np
from typing_extensions import override

from tutti.data.columns import Stored
from tutti.data.contents import Contents, from_keys, to_keys
from tutti.data.formats import Format
from tutti.data.formats.npy import write_npy
from tutti.data.rows import Array, Rows
from tutti.errors import BadData
from tutti.records.npz import DAMAGED, damaged, keys_of, npy_header, open_data_file, read_npz
from tutti.registry import part

_LARGE: Final = 1 << 20
"""Bytes of an array that is read when it is needed."""


@part("NPZ")
class Npz(Format):
    """NPZ files, as of `numpy.savez`."""

    start = b"PK"
    written = ".npz"

    @staticmethod
    def read(path: Path, labelled: bool = True, group: object = None) -> Contents[object]:
        """Read the data set in an NPZ file, by the keys of its arrays.

        Args:
            path: of the file.
            labelled: whether there must be targets.
            group: the array with the group of each sample, which is no input.
        """
        large, keys = _large(path), keys_of(path)
        found: dict[str, object] = {**read_npz(path, set(keys) - large.keys()), **large}
        contents = from_keys({key: found[key] for key in keys}, path.stem, str(path), labelled)
        if group is None or not labelled:
            return contents
        if group not in found:
            raise BadData(f"{path} has no array '{group}' (--group-by); it has {', '.join(keys)}")
        return replace(contents, groups=np.asarray(found[str(group)]))

    @staticmethod
    @override
    def write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
        """Write an archive as `numpy.savez` does."""
        with zipfile.ZipFile(path, "w") as archive:
            for key, rows in to_keys(contents).items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                    write_npy(file, rows)


def _large(path: Path) -> dict[str, Rows]:
    """Return the large arrays by key: mapped into memory, where they are not packed."""
    found: dict[str, Rows] = {}
    try:
        with open_data_file(path) as raw, zipfile.ZipFile(raw) as archive:
            for member in archive.infolist():
                packed = member.compress_type != zipfile.ZIP_STORED
                if packed or member.file_size < _LARGE or not member.filename.endswith(".npy"):
                    continue
                with archive.open(member) as file:
                    rows = _large_array(path, raw, member, file)
                if rows is not None:
                    found[member.filename.removesuffix(".npy")] = rows
    except DAMAGED as error:
        raise damaged(path, error) from error
    return found


def _large_array(path: Path, raw: BinaryIO, member: zipfile.ZipInfo, file: IO[bytes]) -> Array | None:
    """Return an array of an archive; None: it is to be read at once.

    It is read through in any case: zipfile compares its checksum at its end.
    """
    header = npy_header(file)
    if header is None or file.tell() + math.prod(header[0]) * header[2].itemsize != member.file_size:
        return None
    shape, fortran, dtype = header
    if dtype.hasobject or not shape:
        return None
    begin = file.tell()
    while file.read(_LARGE):
        pass
    # The name and the extra field of the local header may have other lengths than those of the directory.
    raw.seek(member.header_offset + 26)
    begin += member.header_offset + 30 + sum(struct.unpack("<HH", raw.read(4)))
    mapped: Array = np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")
    return np.asarray(mapped)
