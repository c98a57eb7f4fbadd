"""NPZ files: archives of NumPy arrays by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.data.contents import Contents, from_keys
from tutti.data.formats import Format
from tutti.errors import BadData
from tutti.records.npz import read_npz
from tutti.registry import part


@part("NPZ")
class Npz(Format):
    """NPZ files, as of `numpy.savez`, with keys x and y, or x_train, y_train, ...

    `group` is the key of the samples' groups.
    """

    start = b"PK"
    options = ("group",)

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        arrays, group = read_npz(path), options.get("group")
        contents = from_keys(arrays, path.stem, str(path), labelled)
        if group is None or not labelled:
            return contents
        if group not in arrays:
            raise BadData(f"{path} has no array '{group}' (--group-by); it has {', '.join(arrays)}")
        return replace(contents, groups=arrays[group])
