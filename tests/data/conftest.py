"""Fixtures of the tests of data sets."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import DataSet, open_data


@pytest.fixture
def opened() -> Callable[..., DataSet]:
    """`open_data` on a world of one."""

    def open_alone(data: object, **arguments: object) -> DataSet:
        return VirtualWorld(ranks=1).run(lambda comm: open_data(data, comm, **arguments))[0]

    return open_alone


@pytest.fixture
def write_idx() -> Callable[[Path, np.ndarray], Path]:
    """Writes an array as an IDX file; packed when the name ends in .gz."""
    kinds = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}

    def write(path: Path, array: np.ndarray) -> Path:
        header = bytes([0, 0, kinds[array.dtype.str[1:]], array.ndim]) + struct.pack(
            f">{array.ndim}I", *array.shape
        )
        content = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def images() -> tuple[np.ndarray, np.ndarray]:
    """60 made-up 8-bit images of 6 x 5 pixels, of 3 classes."""
    random = np.random.default_rng(1)
    return random.integers(0, 256, (60, 6, 5), dtype=np.uint8), np.arange(60, dtype=np.uint8) % 3


def write_part(folder: Path, part: str, sizes: list[int], dtype: str = "uint8", seed: int = 0) -> None:
    """Write samples of 4 x 4 values, each of which says its number, and targets of 5 classes."""
    folder.mkdir(exist_ok=True)
    random, first = np.random.default_rng(seed), 0
    for number, size in enumerate(sizes):
        of = f"-{number:05}-of-{len(sizes):05}" if len(sizes) > 1 else ""
        x = random.integers(0, 256, (size, 4, 4)).astype(dtype)
        numbers = np.arange(first, first + size)
        x[:, 0, 0], x[:, 0, 1] = numbers % 251, numbers // 251
        np.save(folder / f"x_{part}{of}.npy", x)
        np.save(folder / f"y_{part}{of}.npy", numbers % 5)
        first += size


@pytest.fixture
def write() -> Callable[..., None]:
    """`write_part`."""
    return write_part


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with three files of training samples, 331 in all, and a test part of 40."""
    folder = tmp_path / "shards"
    write_part(folder, "train", [100, 131, 100])
    write_part(folder, "test", [40], seed=1)
    return folder
