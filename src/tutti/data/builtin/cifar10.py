"""CIFAR-10, from its publisher's binary archive or from Parquet files.

Source: Krizhevsky (2009), "Learning multiple layers of features from tiny images";
https://www.cs.toronto.edu/~kriz/cifar.html describes the archive.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import Final

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

_ARCHIVE: Final = "cifar-10-binary.tar.gz"

_FILES: Final = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

_SHAPE: Final = (3, 32, 32)
_VALUES: Final = 3 * 32 * 32


@part("cifar10")
def cifar10() -> Contents[object]:
    """60,000 colour pictures of 32 x 32 pixels, of 10 kinds; 10,000 of them are for the test."""
    folder = given_folder("cifar10") or cache_folder() / "cifar10"
    if list(folder.glob("train*.parquet")):
        found = read_path(folder, {"target": "label", "columns": "img"})
        return Contents("cifar10", found.parts, len(LABELS), LABELS)
    archive = folder / _ARCHIVE
    if not archive.is_file():
        raise BadData(
            f"'cifar10' is not in {folder}: put {_ARCHIVE} there, as of "
            "https://www.cs.toronto.edu/~kriz/cifar.html, or train.parquet and test.parquet, as of "
            "https://huggingface.co/datasets/uoft-cs/cifar10; or set TUTTI_DATA to another folder that has a "
            "folder cifar10"
        )
    batches = _batches(archive)
    absent = sorted({*_FILES} - batches.keys())
    if absent:
        raise BadData(f"{archive} lacks {', '.join(absent)}; download it again")
    *train, test = (batches[name] for name in _FILES)
    parts = {"train": (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]))}
    return Contents("cifar10", {**parts, "test": test}, len(LABELS), LABELS)


def _batches(archive: Path) -> dict[str, tuple[Array, Array]]:
    """Read the pictures and the classes in the files of an archive, by their names."""
    found = {}
    try:
        with open_data_file(archive) as raw, tarfile.open(fileobj=raw) as files:
            for entry in files:
                name = entry.name.rpartition("/")[2]
                if name in _FILES and (file := files.extractfile(entry)) is not None:
                    found[name] = _pictures(file.read())
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        raise damaged(archive, error) from error
    return found


def _pictures(content: bytes) -> tuple[Array, Array]:
    """Read a file of the archive: for each picture a byte for its class, and those of its pixels."""
    values = np.frombuffer(content, np.uint8)
    if not len(values) or len(values) % (1 + _VALUES):
        raise ValueError(f"a file of it has {len(values):,} bytes, which are no whole pictures")
    rows = values.reshape(-1, 1 + _VALUES)
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0].astype(np.int64)
