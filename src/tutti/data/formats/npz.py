"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

import zipfile
from pathlib import Path

from typing_extensions import override

from tutti.data.contents import Contents, from_keys, to_keys
from tutti.data.formats import Format
from tutti.data.formats.npy import write_npy
from tutti.data.rows import Array, Rows
from tutti.records.npz import read_npz
from tutti.registry import part


@part("NPZ")
class Npz(Format):
    """NPZ files, as of `numpy.savez`."""

    start = b"PK"
    written = ".npz"

    @staticmethod
    def read(path: Path, labelled: bool = True) -> Contents[object]:
        """Read the data set in an NPZ file, whose keys are those of a dict."""
        return from_keys(read_npz(path), path.stem, str(path), labelled)

    @staticmethod
    @override
    def write(contents: Contents[Rows, Array], path: Path) -> None:
        """Write an archive as `numpy.savez` does."""
        with zipfile.ZipFile(path, "w") as archive:
            for key, rows in to_keys(contents).items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                    write_npy(file, rows)
