"""NPY files: one array in each, of which one holds the inputs and another the targets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np
from typing_extensions import override

from tutti.data.arrays import chunks_of
from tutti.data.columns import Columns, Stored
from tutti.data.contents import EXTRA_KEYS, Contents, from_keys, slot_of, to_keys
from tutti.data.formats import Format, listed
from tutti.data.mapped import Mapped
from tutti.data.rows import Array, Rows, StoredRows, joined, piece
from tutti.errors import BadData, BadOption
from tutti.records.npz import DAMAGED, damaged, open_data_file
from tutti.registry import part

SHARD_BYTES: Final = 1 << 30
"""The inputs that a written file holds at most: a larger array is written as several files."""

MAPPED: Final = 64
"""The files that are mapped at once, at most: each takes one of the open files that a process may have."""

_SHARD: Final = re.compile(r"(.+?)-(\d{1,9})(?:-of-(\d{1,9}))?")
"""Such as x_train-00003-of-00012, or x_train-3."""


@part("NPY")
class Npy(Format):
    """NPY files, as of `numpy.save`: x.npy and y.npy, or a folder of x_train.npy, y_train.npy, ...

    An array may be in several files, called x_train-00000.npy, x_train-00001.npy, ..., also with their number
    as in x_train-00000-of-00012.npy.
    """

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
            found = _by_stem(path)
            if labels is not None and labelled:
                found = _with_labels(found, path / str(labels))
            return from_keys(found, path.resolve().name, str(path), labelled)
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
    def write(contents: Contents[Stored[Rows], Array], path: Path) -> None:
        """Write a folder with a file for each array; those of a part whose one input is large in pieces."""
        path.mkdir()
        cuts: dict[str, range] = {}
        for name, (inputs, _) in contents.parts.items():
            if isinstance(inputs, Columns):
                cuts[name] = range(1)
                continue
            each = SHARD_BYTES // max(1, inputs.size // len(inputs) * inputs.dtype.itemsize)
            cuts[name] = range(0, len(inputs), max(1, each))
        for key, rows in to_keys(contents).items():
            slot = slot_of(key)
            starts = range(1) if slot is None else cuts[slot[0]]
            for number, start in enumerate(starts):
                of = f"-{number:05}-of-{len(starts):05}" if len(starts) > 1 else ""
                with Path(path, f"{key}{of}.npy").open("wb") as file:
                    write_npy(file, rows if len(starts) == 1 else piece(rows, start, start + starts.step))


def files_by_key(folder: Path) -> dict[str, list[Path]]:
    """Return the NPY files of a data set in a folder, by their keys, in the order of the samples.

    Raises:
        BadData: one of several files of an array is missing, or it is there in two forms.
    """
    numbered: dict[str, dict[int, Path]] = {}
    whole: dict[str, Path] = {}
    counts: dict[str, set[str | None]] = {}
    for file in sorted(folder.glob("*.npy")):
        match = _SHARD.fullmatch(file.stem)
        if slot_of(file.stem) is not None or file.stem in EXTRA_KEYS:
            whole[file.stem] = file
        elif match is not None and slot_of(match[1]) is not None:
            key, number = match[1], int(match[2])
            if number in numbered.setdefault(key, {}):
                raise BadData(f"{file} and {numbered[key][number]} have one number; keep one of them")
            numbered[key][number] = file
            counts.setdefault(key, set()).add(match[3])
    for key, files in numbered.items():
        if key in whole:
            raise BadData(
                f"{folder} has {whole[key].name} and {files[min(files)].name}; keep one of these forms"
            )
        if len(counts[key]) > 1:
            raise BadData(f"the names of {key}-... in {folder} say different numbers of files; keep one set")
        (said,) = counts[key]
        first = min(files) if min(files) <= 1 else 0
        due = int(said) if said is not None else max(files) + 1 - first
        missing = [number for number in range(first, first + due) if number not in files]
        if missing or len(files) > due:
            width = len(_SHARD.fullmatch(files[max(files)].stem)[2])  # type: ignore[index]
            which = f"number {missing[0]:0{width}}" if missing else f"none above {first + due - 1}"
            raise BadData(
                f"{folder} has {len(files):,} of {due:,} files {key}-...; it needs {which}: copy it again"
            )
    found = {key: [file] for key, file in whole.items()}
    return found | {key: [files[number] for number in sorted(files)] for key, files in numbered.items()}


def _by_stem(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, files in files_by_key(folder).items():
        read = joined_files(files)  # This refuses files that are broken.
        is_inputs = (slot_of(key) or ("", ""))[1] == "inputs"
        found[key] = Mapped(files) if is_inputs and read.ndim else read
    return found


def _with_labels(arrays: dict[str, object], labels: Path) -> dict[str, object]:
    """Return the arrays of a folder with other targets of the training part.

    Raises:
        BadData: the file is missing or broken.
        BadOption: there is another part, whose targets would mean something else.
    """
    slots = {key: slot_of(key) or ("train", "") for key in arrays}
    other = next((part for part, _ in slots.values() if part != "train"), None)
    if other is not None:
        raise BadOption(
            f"--data.labels names the targets of one part, and {labels.parent} has a {other} part, too; call "
            "the targets of each y_train.npy, y_test.npy, ... in a folder of their own"
        )
    kept = {key: array for key, array in arrays.items() if slots[key][1] != "targets"}
    return {**kept, "y_train": read_npy(labels)}


def joined_files(files: Sequence[Path]) -> Rows:
    """Map the arrays of several files, of which each sample has one shape, as one.

    Raises:
        BadData: a file is missing or broken, or has samples of another shape or type than the first.
    """
    if len(files) == 1:
        return read_npy(files[0])
    pieces: list[Rows] = []
    for file in files:
        array = read_npy(file)
        first = pieces[0] if pieces else array
        texts = array.dtype.kind in "US" and array.dtype.kind == first.dtype.kind
        if (
            array.ndim == 0
            or array.shape[1:] != first.shape[1:]
            or (array.dtype != first.dtype and not texts)
        ):
            raise BadData(
                f"{file} has samples of the shape {array.shape[1:]} and type {array.dtype}, {files[0]} of "
                f"{first.shape[1:]} and {first.dtype}; all files of an array need the same"
            )
        pieces.append(array if len(files) <= MAPPED else _mapped_when_read(file, array))
    return joined(pieces, np.result_type(*(piece.dtype for piece in pieces)))


def _mapped_when_read(file: Path, array: Array) -> StoredRows:
    """Return the samples of a file that is mapped for each reading anew."""
    return StoredRows(array.shape, array.dtype, lambda start, stop: np.array(read_npy(file)[start:stop]))


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
        if isinstance(error, OSError) and error.errno is not None:
            raise BadData(f"{path} cannot be read: {error.strerror}") from error
        raise damaged(path, error) from error
    if not isinstance(array, np.ndarray):
        raise BadData(f"{path} is no NPY file but an archive; call it .npz")
    return np.asarray(array)
