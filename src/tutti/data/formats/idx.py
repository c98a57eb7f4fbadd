"""IDX files: MNIST's format, one array in each, gzip-compressed or not.

Source: the format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from tutti.data.contents import PARTS, Contents, pair_up
from tutti.data.formats import Format, listed, nearest, read_start
from tutti.data.rows import Array
from tutti.errors import BadData
from tutti.records.npz import open_data_file, refuse_larger_than_memory
from tutti.registry import part

_IDX_NAME = re.compile(
    r"(?P<set>.*?)(?P<part>train|test|t10k|val|valid|validation)[-_.](?P<kind>images|labels)"
    r"([-_.]idx\d)?([-_.]ubyte|\.idx)?(\.gz)?$"
)
"""Such as train-images-idx3-ubyte.gz, t10k-labels.idx1-ubyte, emnist-letters-test-images-idx3-ubyte.gz."""

_WORDS = (("images", "labels"), ("inputs", "targets"), ("idx3", "idx1"))

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@part("IDX")
class Idx(Format):
    """IDX files, of which one holds the inputs and another of a like name the labels."""

    start = b"\0\0"

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder has files with names such as train-images-idx3-ubyte."""
        return any(_IDX_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file())

    @staticmethod
    def read(path: Path, labelled: bool = True) -> Contents[object]:
        """Read the inputs in a file, and the labels in the file that goes with it; or those of a folder."""
        if path.is_dir():
            return read_folder(path)
        inputs = read_idx(path)
        if not labelled:
            return Contents(_stem(path), {"train": (inputs, None)})
        return Contents(_stem(path), {"train": (inputs, read_idx(_labels_beside(path)))})


@part("IDX.gz")
class PackedIdx(Idx):
    """IDX files that gzip has compressed."""

    start = b"\x1f\x8b"


def read_idx(path: Path) -> Array:
    """Open the array in an IDX file, gzip-compressed or not (its first bytes tell, not its name).

    Raises:
        BadData: the file is missing, empty, truncated, too long, or no IDX file.
    """
    packed = read_start(path).startswith(PackedIdx.start)
    with open_data_file(path) as raw, _unpacked(path, raw) if packed else nullcontext(raw) as file:
        start = file.read(4)
        if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _IDX_TYPES or start[3] == 0:
            raise BadData(
                f"{path} is no IDX file: it begins with the bytes {start.hex(' ')}, where an IDX file has 00 "
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
        asked = f"where its header (shape {shape}, {dtype.itemsize} bytes per value) asks for"
        refuse_larger_than_memory(path, nbytes)
        if packed:
            content = file.read(nbytes)
            if len(content) < nbytes:
                raise EOFError("it ends too early")
            there = header + nbytes + len(file.read(1))
        else:
            there = os.fstat(raw.fileno()).st_size
        if there != header + nbytes:
            state = "truncated" if there < header + nbytes else "too long"
            raise BadData(
                f"{path} is {state}: {there:,} bytes, {asked} {header + nbytes:,}; copy or download it again"
            )
        if packed or not nbytes:
            values: Array = np.frombuffer(content if packed else b"", dtype).reshape(shape)
        else:
            values = np.asarray(np.memmap(path, dtype, "r", header, shape))
        return values.astype(dtype.newbyteorder("="), copy=False)


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


def read_folder(folder: Path) -> Contents[object]:
    """Read the data set in the IDX files of a folder.

    Raises:
        BadData: files are missing or broken, or belong to several data sets.
    """
    there = sorted(p.name for p in folder.iterdir() if p.is_file())
    found: dict[tuple[str, str], Path] = {}
    sets = set()
    for name in there:
        match = _IDX_NAME.fullmatch(name)
        if match:
            part = "test" if match["part"] == "t10k" else PARTS[match["part"]]
            # Sorted names put an unpacked file before the same one as .gz; the first is kept.
            found.setdefault((part, match["kind"]), folder / name)
            sets.add(match["set"])
    if len(sets) > 1:
        raise BadData(
            f"{folder} holds {len(sets)} data sets ({', '.join(sorted(sets))}); name one file with images "
            "instead"
        )
    explained = (
        f"it has: {listed(there) or 'no file'}; expected train-images-idx3-ubyte and "
        "train-labels-idx1-ubyte (also as .gz, and t10k-... for the test part)"
    )
    pairs = pair_up(found, ("images", "labels"), str(folder), explained)
    parts = {part: (read_idx(images), read_idx(labels)) for part, (images, labels) in pairs.items()}
    return Contents(folder.resolve().name, parts)


def _labels_beside(inputs: Path) -> Path:
    """Return the file with the labels of an IDX file, found in its folder by its name."""
    name = inputs.name
    for word, other in _WORDS:
        name = name.replace(word, other)
    if name == inputs.name:
        raise BadData(
            f"{inputs} has no labels: its name does not say how they are called; name the pair like "
            f"'train-images-idx3-ubyte' and 'train-labels-idx1-ubyte'"
        )
    for option in (name, name.removesuffix(".gz"), name.removesuffix(".gz") + ".gz"):
        if (inputs.parent / option).is_file():
            return inputs.parent / option
    missing = inputs.parent / name
    raise BadData(f"the labels of {inputs} are missing: there is no {missing}; {nearest(missing)}")


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".idx")
