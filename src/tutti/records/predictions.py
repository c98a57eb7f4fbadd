"""The outputs of a trained model for samples that it was not trained on. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData
from tutti.records.npz import npz_bytes, read_npz

_KEYS: Final = ("rows", "outputs", "targets")


@dataclass(frozen=True)
class Predictions:
    """The outputs of a model for some samples, each once."""

    rows: NDArray[np.int64]  # the samples' numbers in the data set, ascending, of shape (samples,), int64
    outputs: NDArray[Any]  # of the model, of shape (samples, ...)
    targets: NDArray[Any]  # of shape (samples, ...)

    def as_bytes(self) -> bytes:
        """Return the content of a file: the same for the same predictions."""
        return npz_bytes({name: getattr(self, name) for name in _KEYS})

    @classmethod
    def read(cls, path: Path) -> Predictions:
        """Read a file."""
        arrays = read_npz(path, _KEYS)
        missing = [name for name in _KEYS if name not in arrays]
        if missing:
            raise BadData(f"{path} lacks {' and '.join(missing)}, so it holds no predictions")
        predictions = cls(**arrays)
        lengths = {len(arrays[name]) if arrays[name].ndim else -1 for name in _KEYS}
        if len(lengths) != 1 or predictions.rows.ndim != 1 or predictions.rows.dtype != np.int64:
            shapes = ", ".join(f"{name} {arrays[name].shape} {arrays[name].dtype}" for name in _KEYS)
            raise BadData(f"the arrays in {path} do not belong together: {shapes}; make them again")
        return predictions
