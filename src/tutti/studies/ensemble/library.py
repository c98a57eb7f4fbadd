"""The library of models that an ensemble is chosen from: what each predicts for samples that it never saw.

    candidate    fold 0: samples 3 7 8    fold 1: samples 0 2 5    ...
    mlp          p p p                    p p p
    lenet        p p p                    p p p

Outputs of networks are made values that can be averaged: probabilities of classes and of labels, amounts as
they are. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData
from tutti.records.output_kinds import LOSSES, Kind
from tutti.records.predictions import Predictions
from tutti.studies.cross_validation.scores import NO_LABEL

Array = NDArray[Any]


@dataclass(frozen=True)
class Library:
    """The values of all candidates for the same samples.

    Attributes:
        names: of the candidates.
        kind: of the values.
        values: of shape (candidates, samples, numbers).
        targets: of the samples, of shape (samples, ...); of a class for each position one sample each.
        rows: the number of each sample in the data set, where it may be several times.
        folds: which fold each prediction is of.
    """

    names: tuple[str, ...]
    kind: Kind
    values: NDArray[np.float64]
    targets: Array
    rows: NDArray[np.int64]
    folds: NDArray[np.int64]

    @property
    def truth(self) -> NDArray[np.float64]:
        """The values that would be right, of shape (samples, numbers)."""
        numbers = self.values.shape[2]
        if self.targets.dtype.kind in "iu" and numbers > 1 and self.targets.ndim == 1:
            found: NDArray[np.float64] = np.eye(numbers)[self.targets]
            return found
        return self.targets.reshape(len(self.targets), -1).astype(np.float64)

    def of(self, names: Sequence[str]) -> Library:
        """Return that of some candidates, in this order."""
        at = [self.names.index(name) for name in names]
        return replace(self, names=tuple(names), values=self.values[at])

    def at(self, kept: NDArray[np.bool_]) -> Library:
        """Return that of some samples."""
        return replace(
            self,
            values=self.values[:, kept],
            targets=self.targets[kept],
            rows=self.rows[kept],
            folds=self.folds[kept],
        )

    def fold(self, number: int) -> tuple[Library, Library]:
        """Return that of the predictions of a fold, and that of all samples that the fold does not have."""
        own = self.folds == number
        return self.at(own), self.at(~np.isin(self.rows, self.rows[own]))

    def predictions(self, values: Array) -> Predictions:
        """Return values for its samples as the predictions of a network."""
        return Predictions(self.rows, self.kind.outputs(values), self.targets)


def library_of(candidates: Mapping[str, Sequence[Predictions]], losses: Mapping[str, str]) -> Library:
    """Make the library of the predictions of each candidate for each fold.

    Args:
        candidates: the predictions by candidate, all of the same folds.
        losses: what each was trained with.

    Raises:
        BadData: the candidates have no outputs that can be combined, or outputs that mean different things.
    """
    first = next(iter(candidates))
    kinds = {name: kind_of(losses[name], folds[0]) for name, folds in candidates.items()}
    shapes = {name: folds[0].outputs.shape[1:] for name, folds in candidates.items()}
    for name, folds in candidates.items():
        if kinds[name] is not kinds[first] or shapes[name] != shapes[first]:
            raise BadData(
                f"{name} and {first} cannot be combined: the outputs of one are "
                f"{_said(kinds[name], shapes[name])}, those of the other "
                f"{_said(kinds[first], shapes[first])}; cross-validate models that give the same"
            )
        same = all(
            np.array_equal(one.rows, other.rows) and np.array_equal(one.targets, other.targets)
            for one, other in zip(folds, candidates[first], strict=True)
        )
        if not same:
            raise BadData(
                f"{name} and {first} cannot be combined: they predict different samples; cross-validate both "
                "on the same folds"
            )
        if not all(np.isfinite(one.outputs).all() for one in folds):
            raise BadData(f"{name} predicts numbers that are not finite; leave it out, or train it again")
    kind = kinds[first]
    flat = {name: [_flat(one) for one in folds] for name, folds in candidates.items()}
    values = np.stack(
        [np.concatenate([kind.values(one.outputs) for one in folds]) for folds in flat.values()]
    )
    folds = flat[first]
    targets, rows = (np.concatenate([getattr(one, part) for one in folds]) for part in ("targets", "rows"))
    numbers = np.repeat(np.arange(len(folds)), [len(one.rows) for one in folds])
    return Library(tuple(candidates), kind, values, targets, rows, numbers)


def kind_of(loss: str, found: Predictions) -> Kind:
    """Return the kind of a model's outputs.

    Args:
        loss: what it was trained with.
        found: some of its predictions.

    Raises:
        BadData: outputs of such a loss cannot be combined.
    """
    whole = found.targets.dtype.kind in "iu"
    scores = found.outputs.ndim == found.targets.ndim + 1 and found.outputs.shape[1] > 1
    kind = LOSSES.get(loss, Kind.CLASSES if whole and scores else Kind.AMOUNTS)
    if kind is Kind.CLASSES and not (whole and scores):
        raise BadData(
            f"models of the loss '{loss}' are combined where each sample has one class, and here the "
            "targets are shares of classes; train with another loss"
        )
    if kind is Kind.AMOUNTS and whole and loss not in LOSSES:
        raise BadData(
            f"the loss '{loss}' gives a single number for each class number, and what that means is not "
            "known; train with 'cross_entropy', 'bce' or 'mse'"
        )
    return kind


def _flat(found: Predictions) -> Predictions:
    """Return predictions of shape (samples, numbers), of which each has a label where there are classes."""
    outputs, targets, rows = found.outputs, found.targets, found.rows
    if targets.dtype.kind in "iu" and outputs.ndim == targets.ndim + 1 and outputs.shape[1] > 1:
        rows = np.repeat(rows, int(np.prod(targets.shape[1:])))
        outputs = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1])
        kept = targets.ravel() != NO_LABEL
        return Predictions(rows[kept], outputs[kept], targets.ravel()[kept])
    return Predictions(rows, outputs.reshape(len(outputs), -1), targets)


def _said(kind: Kind, shape: tuple[int, ...]) -> str:
    return f"{'x'.join(map(str, shape)) or 'single'} {kind.value}"
