"""The outputs of models: scores of classes, logits of labels, or numbers. Needs no torch."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tutti.errors import BadData

Array = NDArray[Any]

LEAST: Final = 1e-15
"""The least probability whose logarithm is taken."""


class Kind(Enum):
    """The kind of a model's outputs, which determines how to average them."""

    CLASSES = "classes"
    FLAGS = "flags"
    REGRESSION = "regression"

    def values(self, outputs: Array) -> Array:
        """Return values to average for a network's outputs, of shape (samples, numbers, ...)."""
        wide = outputs.astype(np.float64)
        if self is Kind.CLASSES:
            if outputs.ndim < 2 or outputs.shape[1] == 1:
                raise BadData(
                    "the model gives a single number for each sample, and what that means for its classes is "
                    "not known of a loss of your own; use its outputs, or train with the loss 'bce'"
                )
            found: Array = special.softmax(wide, axis=1)
            return found
        return special.expit(wide) if self is Kind.FLAGS else wide

    def classes(self, values: Array, classes: int | None) -> NDArray[np.int64]:
        """Return the classes of values: the largest, or the nearest to a single one.

        Without a number of classes each value is a label of 0 or 1.
        """
        single = values.ndim < 2 or values.shape[1] == 1
        if self is Kind.CLASSES or (classes is not None and not single):
            found: NDArray[np.int64] = values.argmax(1)
            return found
        nearest = np.rint(values).clip(0, None if classes is None else classes - 1).astype(np.int64)
        return nearest.reshape(len(nearest)) if classes is not None else nearest


LOSSES: Final = {
    "cross_entropy": Kind.CLASSES,
    "nll": Kind.CLASSES,
    "bce": Kind.FLAGS,
    "mse": Kind.REGRESSION,
    "l1": Kind.REGRESSION,
}
"""The kind of outputs that each loss makes."""


def kind_of(loss: str, classes: int | None) -> Kind:
    """Return the kind of a model's outputs."""
    return LOSSES.get(loss, Kind.REGRESSION if classes is None else Kind.CLASSES)
