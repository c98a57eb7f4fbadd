"""scikit-learn's handwritten digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from tutti.data.contents import Contents
from tutti.data.splits import split
from tutti.registry import part

LABELS = tuple(str(digit) for digit in range(10))


@part("digits")
def digits() -> Contents[object]:
    """1,797 handwritten digits of 8 x 8 pixels, from scikit-learn; the test part is always the same."""
    # The file is read without importing scikit-learn, whose import takes as long as the rest of the start.
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "it is a dependency"
    assert package.origin is not None, "it has a file"
    table = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    inputs = table[:, :-1].astype(np.uint8).reshape(-1, 8, 8)
    targets = table[:, -1].astype(np.int64)
    train, test = split(targets, share=0.2, seed=0, classes=10)
    parts = {"train": (inputs[train], targets[train]), "test": (inputs[test], targets[test])}
    return Contents("digits", parts, classes=10, labels=LABELS)
