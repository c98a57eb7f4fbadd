"""Metrics that are functions of the user's, or of scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.errors import BadOption
from tutti.training.metrics.base import Metric, gathered
from tutti.training.reading import AMOUNTS, CLASSES, FLAGS, Reading

Array = NDArray[Any]

TARGETS: Final = ("targets", "y_true", "y1")
"""Names of a first parameter by which a function gets targets before outputs, as scikit-learn has them."""

DECISIONS: Final = ("y_pred", "y2")
"""Names of a second parameter that is for predicted classes, or amounts."""

PROBABILITIES: Final = ("y_score", "y_prob", "y_proba")
"""Names of a second parameter that is for probabilities."""


def own_metric(function: object, name: str, reading: Reading) -> Metric:
    """Make a metric of a function.

    A function whose first parameter is one of `TARGETS` gets targets and outputs of all samples of a part at
    once, as arrays of NumPy. Any other gets outputs and targets, as tensors, and gives one value for each
    sample, or one number for all of them.

    Args:
        function: of the user's.
        name: its name.
        reading: the meaning of the outputs.

    Raises:
        BadOption: it is no function.
    """
    if not callable(function):
        raise BadOption(
            f"metric '{name}' is a {type(function).__name__}, not a function of (outputs, targets)"
        )
    if isinstance(function, type):
        raise BadOption(f"metric '{name}' is a class, not a function of (outputs, targets); give {name}(...)")
    first, second = _first_two(function)
    if first not in TARGETS:
        return Metric(name=name, function=function)

    def all_at_once(outputs: Tensor, targets: Tensor) -> object:
        return function(*_arrays(second, reading, outputs, targets))

    return gathered(name, all_at_once)


def _first_two(function: Callable[..., object]) -> tuple[str, str]:
    try:
        first, second, *_ = inspect.signature(function).parameters
    except ValueError:  # It does not tell them, or has fewer.
        return "", ""
    return first, second


def _arrays(wanted: str, reading: Reading, outputs: Tensor, targets: Tensor) -> tuple[Array, Array]:
    """Return targets and outputs as a parameter of that name wants them."""
    if wanted in DECISIONS and reading.kind in (CLASSES, FLAGS):
        found, true = reading.decisions(outputs, targets)
        return np.asarray(true.long()), np.asarray(found.long())
    if wanted in DECISIONS and reading.kind == AMOUNTS:
        return np.asarray(targets), np.asarray(outputs.reshape(targets.shape))
    if wanted in PROBABILITIES and reading.kind in (CLASSES, FLAGS):
        probabilities, true = reading.probabilities(outputs, targets)
        two = true.dim() == 1 and probabilities.shape[1] == 2
        return np.asarray(true.long()), np.asarray(probabilities[:, 1] if two else probabilities)
    return np.asarray(targets), np.asarray(outputs)
