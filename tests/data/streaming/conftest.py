"""Folders of NPY files for the tests of streaming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


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
