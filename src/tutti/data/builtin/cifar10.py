"""CIFAR-10, from its publisher's archives or from Parquet files.

Source: Krizhevsky (2009), "Learning multiple layers of features from tiny images";
https://www.cs.toronto.edu/~kriz/cifar.html describes both archives.
"""

from __future__ import annotations

import gzip
import pickletools
import tarfile
import zlib
from pathlib import Path
from typing import IO, Final, cast

import numpy as np

from tutti.data.contents import Contents
from tutti.data.downloads import given_folder
from tutti.data.formats import read_path
from tutti.data.rows import Array
from tutti.errors import BadData
from tutti.records.files import cache_folder
from tutti.records.npz import damaged, open_data_file
from tutti.registry import part

LABELS = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

_ARCHIVES: Final = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")

_TRAIN: Final = tuple(f"data_batch_{number}" for number in range(1, 6))

_KEYS: Final = (b"batch_label", b"labels", b"data", b"filenames")
"""Those of the dict that is a file of the Python archive."""

_SHAPE: Final = (3, 32, 32)
_VALUES: Final = 3 * 32 * 32

_MOST_BYTES: Final = 64 << 20
"""The largest file of an archive: none has half of it."""

_MOST_UNPACKED: Final = 512 << 20
"""The most that is unpacked: the archives have less than half of it."""


@part("cifar10")
def cifar10() -> Contents[object]:
    """60,000 colour pictures of 32 x 32 pixels, of 10 kinds; 10,000 of them are for the test."""
    folder = given_folder("cifar10") or cache_folder() / "cifar10"
    if list(folder.glob("train*.parquet")):
        found = read_path(folder, {"target": "label", "columns": "img"})
        return Contents("cifar10", found.parts, len(LABELS), LABELS)
    archive = next((folder / name for name in _ARCHIVES if (folder / name).is_file()), None)
    if archive is None:
        raise BadData(
            f"'cifar10' is not in {folder}: put cifar-10-binary.tar.gz or cifar-10-python.tar.gz there, as of"
            " https://www.cs.toronto.edu/~kriz/cifar.html, or train.parquet and test.parquet, as of "
            "https://huggingface.co/datasets/uoft-cs/cifar10; or set TUTTI_DATA to another folder that has a "
            "folder cifar10"
        )
    batches = _batches(archive)
    absent = sorted({*_TRAIN, "test_batch"} - batches.keys())
    if absent:
        raise BadData(f"{archive} lacks {', '.join(absent)}; download it again")
    train = [batches[name] for name in _TRAIN]
    parts = {"train": (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]))}
    return Contents("cifar10", {**parts, "test": batches["test_batch"]}, len(LABELS), LABELS)


def _batches(archive: Path) -> dict[str, tuple[Array, Array]]:
    """Read the pictures and the classes in the files of an archive, by their names."""
    found = {}
    try:
        with (
            open_data_file(archive) as raw,
            gzip.GzipFile(fileobj=raw) as unpacked,
            tarfile.open(fileobj=cast("IO[bytes]", _Bounded(unpacked)), mode="r|") as files,
        ):
            for entry in files:
                name = entry.name.rpartition("/")[2]
                stem = name.removesuffix(".bin")
                if stem in {*_TRAIN, "test_batch"} and entry.isfile() and entry.size <= _MOST_BYTES:
                    file = files.extractfile(entry)
                    assert file is not None, "it is a file"
                    content = file.read()
                    found[stem] = _of_bytes(content) if name.endswith(".bin") else _of_pickle(content)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        raise damaged(archive, error) from error
    return found


class _Bounded:
    """A file that ends with an error where a bomb would go on."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self._left = file, _MOST_UNPACKED

    def read(self, size: int = -1) -> bytes:
        """Read some bytes."""
        content = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it holds more than {_MOST_UNPACKED:,} bytes when it is unpacked")
        return content


def _of_bytes(content: bytes) -> tuple[Array, Array]:
    """Read a file of the binary archive: for each picture a byte for its class, and those of its pixels."""
    values = np.frombuffer(content, np.uint8)
    if not len(values) or len(values) % (1 + _VALUES):
        raise ValueError(f"a file of it has {len(values):,} bytes, which are no whole pictures")
    rows = values.reshape(-1, 1 + _VALUES)
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0].astype(np.int64)


def _of_pickle(content: bytes) -> tuple[Array, Array]:
    """Read a file of the Python archive, a pickled dict, without unpickling it, as that runs code.

    The pixels are the longest text in it; the classes are the whole numbers after the key "labels".
    """
    pixels, labels, key = b"", [], b""
    for opcode, value, _ in pickletools.genops(content):
        if isinstance(value, str | bytes):
            text = value.encode("latin-1", "replace") if isinstance(value, str) else value
            pixels = max(pixels, text, key=len)
            key = text if text in _KEYS else key
        elif isinstance(value, int) and key == b"labels" and opcode.name.startswith(("BININT", "INT")):
            labels.append(value)
    values, classes = np.frombuffer(pixels, np.uint8), np.array(labels, np.int64)
    if not labels or len(values) != len(labels) * _VALUES:
        raise ValueError(f"a file of it has {len(values):,} values for {len(labels):,} pictures")
    return values.reshape(-1, *_SHAPE), classes
