"""Data sets converted to folders of NPY files, which are read fastest."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tutti.data.arrays import chunks_of
from tutti.data.columns import Stored
from tutti.data.contents import Contents, to_keys
from tutti.data.rows import Array, Rows
from tutti.errors import BadData, BadOption, with_remedy


def check_new(path: Path) -> None:
    """Refuse the path of a new folder if something is there, or if it looks like a file name."""
    if os.path.lexists(path):
        raise BadOption(f"there is a {path} already; name another, or take it away")
    if path.suffix:
        raise BadOption(f"{path} is called like a file; name a new folder, for NPY files")


def convert(contents: Contents[Stored[Rows], Array], path: Path) -> int:
    """Write a data set into a new folder, whole or not at all, and return its bytes.

    Args:
        contents: of arrays, or of readers of pieces.
        path: of the folder.

    Raises:
        BadData: there is no room, or the folder cannot be made.
        BadOption: there is something at the path.
    """
    check_new(path)
    keys = to_keys(contents)
    try:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.unfinished-") as made:
            folder = Path(made, path.name)
            folder.mkdir()
            for key, rows in keys.items():
                _write(folder / f"{key}.npy", rows)
            check_new(path)
            folder.rename(path)
    except OSError as error:
        size = sum(rows.size * rows.dtype.itemsize for rows in keys.values())
        known = with_remedy(error) or f"{path} cannot be written: {error.strerror or error}"
        raise BadData(f"{known}; the new data take about {size:,} bytes") from error
    return sum(file.stat().st_size for file in path.iterdir())


def _write(path: Path, rows: Rows) -> None:
    """Write an NPY file, chunk by chunk."""
    descr, shape = np.lib.format.dtype_to_descr(rows.dtype), tuple(rows.shape)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        for _, chunk in chunks_of(rows) if rows.ndim else [(0, np.asarray(rows))]:
            file.write(chunk.astype(rows.dtype, copy=False).tobytes())
