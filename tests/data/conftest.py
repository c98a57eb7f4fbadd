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
