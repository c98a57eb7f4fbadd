"""The generators of random numbers that a rank draws from: torch's on the CPU, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tutti.state import Values


def random_state() -> Values:
    """Return the states of this process's generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def load_random_state(values: Values) -> None:
    """Have this process's generators go on from earlier states."""
    torch.set_rng_state(values["torch"].clone())
    kind, keys, *rest = values["numpy"]
    numpy: tuple[Any, ...] = (kind, keys.numpy().astype(np.uint32), *rest)
    np.random.set_state(numpy)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
