"""NPY files: one array in each, of which one holds the inputs and another the targets."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from typing_extensions import override

from tutti.data.arrays import chunks_of
from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of, to_keys
from tutti.data.formats import Format, listed
from tutti.data.rows import Array, Rows
from tutti.errors import BadData
from tutti.records.npz import DAMAGED, open_data_file
from tutti.registry import part


@part("NPY")
class Npy(Format):
    """NPY files, as of `numpy.save`: x.npy and y.npy, or a folder of x_train.npy, y_train.npy, ..."""

    start = b"\x93NUMPY"
    written = "/"

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder has NPY files."""
        return any(folder.glob("*.npy"))

    @staticmethod
    def read(path: Path, labels: str | None = None, labelled: bool = True) -> Contents[object]:
        """Read a pair of files, or those of a folder. They are mapped, and not read before they are needed.

        Args:
            path: of the inputs, or of a folder.
            labels: the path of the targets, from the folder of the inputs; None: its name says it.
            labelled: whether there must be targets.
        """
        if path.is_dir():
            return from_keys(_by_stem(path), path.resolve().name, str(path), labelled)
        if not labelled:
            return Contents(path.stem, {"train": (read_npy(path), None)})
        if labels is not None:
            return Contents(path.stem, {"train": (read_npy(path), read_npy(path.parent / str(labels)))})
        slot = slot_of(path.stem)
        others = {slot_of(file.stem): file for file in sorted(path.parent.glob("*.npy"))}
        if slot is None or slot[1] != "inputs" or (slot[0], "targets") not in others:
            there = listed(sorted(file.name for file in path.parent.glob("*.npy")))
            raise BadData(
                f"{path} has no targets beside it whose name says that they are its own: its folder has "
                f"{there}; call a pair x.npy and y.npy, or name the targets by --data.labels FILE"
            )
        return Contents(path.stem, {"train": (read_npy(path), read_npy(others[slot[0], "targets"]))})

    @staticmethod
    @override
    def write(contents: Contents[Rows, Array], path: Path) -> None:
        """Write a folder with a file for each array."""
        path.mkdir()
        for key, rows in to_keys(contents).items():
            with Path(path, f"{key}.npy").open("wb") as file:
                write_npy(file, rows)


def _by_stem(folder: Path) -> dict[str, object]:
    return {
        file.stem: read_npy(file)
        for file in sorted(folder.glob("*.npy"))
        if slot_of(file.stem) is not None or file.stem in EXTRA_KEYS
    }


def write_npy(file: IO[bytes], rows: Rows) -> None:
    """Write samples as an NPY file, chunk by chunk."""
    header = {
        "descr": np.lib.format.dtype_to_descr(rows.dtype),
        "fortran_order": False,
        "shape": tuple(rows.shape),
    }
    np.lib.format.write_array_header_1_0(file, header)
    if rows.ndim == 0:
        file.write(np.asarray(rows).tobytes())
        return
    for _, chunk in chunks_of(rows):
        file.write(chunk.astype(rows.dtype, copy=False).tobytes())


def read_npy(path: Path) -> Array:
    """Map the array in an NPY file into memory. Nothing is unpickled.

    Raises:
        BadData: the file is missing, truncated or no NPY file, or holds Python objects.
    """
    with open_data_file(path):
        pass
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        if "Python objects" in str(error) or "pickle" in str(error):
            raise BadData(
                f"{path} holds Python objects, which are not loaded because unpickling runs code; save it as "
                "numbers: array.astype('float32') or array.astype('int64')"
            ) from error
        size = path.stat().st_size
        raise BadData(
            f"{path} is truncated or damaged ({size:,} bytes): {str(error)[:200]}; copy it again"
        ) from error
    if not isinstance(array, np.ndarray):
        raise BadData(f"{path} is no NPY file but an archive; call it .npz")
    return np.asarray(array)
