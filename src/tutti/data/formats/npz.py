"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

from pathlib import Path

from tutti.data.contents import Contents, from_keys
from tutti.data.formats import Format
from tutti.records.npz import read_npz
from tutti.registry import part


@part("NPZ")
class Npz(Format):
    """NPZ files, as of `numpy.savez`."""

    start = b"PK"

    @staticmethod
    def read(path: Path) -> Contents[object]:
        """Read the data set in an NPZ file, whose keys are those of a dict."""
        return from_keys(read_npz(path), path.stem, str(path))
