"""The library that an ensemble is chosen from: the predictions of models for held-out samples.

    candidate    fold 0: samples 3 7 8    fold 1: samples 0 2 5    ...
    mlp          p p p                    p p p
    lenet        p p p                    p p p

The outputs become values that can be averaged: probabilities of classes and labels; amounts stay as they
are. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData
from tutti.records.output_kinds import LEAST, Kind
from tutti.records.predictions import Predictions
from tutti.studies.score import Score

Array = NDArray[Any]

NO_LABEL: Final = -100
"""The class of a sample without a label, as in `tutti.data.targets`."""


@dataclass(frozen=True)
class Library:
    """The values of all candidates for the same samples."""

    names: tuple[str, ...]  # of the candidates
    kind: Kind  # of the values
    values: NDArray[np.float64]  # (candidates, samples, numbers)
    targets: Array  # (samples, ...); with a class for each position, a position is a sample
    rows: NDArray[np.int64]  # the number of each sample in the data set, possibly repeated
    folds: NDArray[np.int64]  # the fold of each prediction

    @property
    def score(self) -> Score:
        """The figure that compares values: the accuracy, or the mean squared error of amounts."""
        return Score("mse", False) if self.kind is Kind.REGRESSION else Score("accuracy", True)

    def scored(self, values: Array) -> float:
        """Return the score of values of shape (samples, numbers)."""
        if self.kind is Kind.REGRESSION:
            return self.loss(values)
        if self.targets.ndim == 1 and values.shape[1] > 1:
            return float((values.argmax(1) == self.targets).mean())
        return float(((values > 0.5) == (self._truth > 0.5)).mean())

    def loss(self, values: Array) -> float:
        """Return the mean negative log-likelihood of probabilities, or the squared error of amounts."""
        if self.kind is Kind.REGRESSION:
            return float(np.mean((values - self._truth) ** 2))
        if self.kind is Kind.CLASSES:
            likely = values[np.arange(len(values)), self.targets]
        else:
            likely = self._truth * values + (1 - self._truth) * (1 - values)
        return float(-np.log(np.maximum(likely, LEAST)).mean())

    @property
    def _truth(self) -> NDArray[np.float64]:
        """Return the ideal values, of shape (samples, numbers)."""
        numbers = self.values.shape[2]
        if self.targets.dtype.kind in "iu" and numbers > 1 and self.targets.ndim == 1:
            truth: NDArray[np.float64] = np.eye(numbers)[self.targets]
            return truth
        return self.targets.reshape(len(self.targets), -1).astype(np.float64)

    def of(self, names: Sequence[str]) -> Library:
        """Return the library of some candidates, in this order."""
        at = [self.names.index(name) for name in names]
        return replace(self, names=tuple(names), values=self.values[at])

    def fold(self, number: int) -> tuple[Library, Library]:
        """Return the predictions of a fold, and the predictions for samples outside the fold."""
        own = self.folds == number
        return self._at(own), self._at(~np.isin(self.rows, self.rows[own]))

    def _at(self, kept: NDArray[np.bool_]) -> Library:
        values, rest = self.values[:, kept], (self.targets[kept], self.rows[kept], self.folds[kept])
        return Library(self.names, self.kind, values, *rest)


def library_of(candidates: Mapping[str, Sequence[Predictions]], kinds: Mapping[str, Kind]) -> Library:
    """Make the library from the predictions of each candidate for each fold."""
    first = next(iter(candidates))
    kind, folds = kinds[first], candidates[first]
    for name, found in candidates.items():
        pairs = list(zip(found, folds, strict=True))
        if kinds[name] is not kind or any(
            one.outputs.shape != other.outputs.shape
            or not np.array_equal(one.rows, other.rows)
            or not np.array_equal(one.targets, other.targets)
            for one, other in pairs
        ):
            raise BadData(
                f"{name} and {first} cannot be combined: their outputs or samples differ; cross-validate "
                "models with the same outputs, on the same folds"
            )
        if not all(np.isfinite(one.outputs).all() for one in found):
            raise BadData(f"{name} predicts numbers that are not finite; leave it out, or train it again")
    if kind is Kind.CLASSES and folds[0].targets.dtype.kind not in "iu":
        raise BadData("the targets are shares of classes; an ensemble needs one class for each sample")
    flat = {name: [_flat(one, kind) for one in found] for name, found in candidates.items()}
    values = np.stack([np.concatenate([one.outputs for one in found]) for found in flat.values()])
    targets, rows = (
        np.concatenate([getattr(one, part) for one in flat[first]]) for part in ("targets", "rows")
    )
    numbers = np.repeat(np.arange(len(folds)), [len(one.rows) for one in flat[first]])
    return Library(tuple(candidates), kind, values, targets, rows, numbers)


def _flat(predictions: Predictions, kind: Kind) -> Predictions:
    """Return values of shape (samples, numbers), without the samples that have no label."""
    values, targets, rows = kind.values(predictions.outputs), predictions.targets, predictions.rows
    if kind is Kind.CLASSES:
        rows = np.repeat(rows, int(np.prod(targets.shape[1:])))
        values = np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])
        kept = targets.ravel() != NO_LABEL
        return Predictions(rows[kept], values[kept], targets.ravel()[kept])
    return Predictions(rows, values.reshape(len(values), -1), targets)
