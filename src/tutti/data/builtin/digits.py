"""scikit-learn's handwritten digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from tutti.data.contents import Contents
from tutti.data.rows import Array
from tutti.data.splits import split
from tutti.registry import part

LABELS = tuple(str(digit) for digit in range(10))


@part("digits")
def digits() -> Contents[object]:
    """1,797 handwritten digits of 8 x 8 pixels, from scikit-learn; the test part is always the same."""
    table = _digits_table()
    inputs = table[:, :-1].astype(np.uint8).reshape(-1, 8, 8)
    targets = table[:, -1].astype(np.int64)
    train, test = split(targets, share=0.2, seed=0, classes=10)
    parts = {"train": (inputs[train], targets[train]), "test": (inputs[test], targets[test])}
    return Contents("digits", parts, classes=10, labels=LABELS)


def _digits_table() -> Array:
    """64 pixels of 0 to 16 and the digit, one sample in each row."""
    # The file is read without importing scikit-learn, whose import takes as long as the rest of the start.
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table: Array = np.loadtxt(file, delimiter=",")
            return table
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
