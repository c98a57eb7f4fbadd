"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.data.contents import Contents, from_keys
from tutti.data.formats import Format
from tutti.records.npz import read_npz
from tutti.registry import part


@part("NPZ")
class Npz(Format):
    """NPZ files, as of `numpy.savez`, whose keys are x and y, or x_train, y_train, ..."""

    start = b"PK"

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        return from_keys(read_npz(path), path.stem, str(path), labelled)
