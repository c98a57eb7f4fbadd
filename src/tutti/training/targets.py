"""The meaning of targets and outputs: classes, labels of 0 or 1 (flags), shares of classes, or amounts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tutti.data.parts import DataSet
from tutti.errors import BadModel, BadOption

CLASSES: Final = "classes"
FLAGS: Final = "flags"
SHARES: Final = "shares"
AMOUNTS: Final = "numbers"

ROUNDING: Final = 1e-3
"""The most by which the shares of a sample may miss 1."""


def loss_for(targets: Tensor) -> str:
    """Return the name of the loss for the targets of a training part."""
    if not targets.is_floating_point():
        return "cross_entropy"
    if targets.numel() == len(targets):
        return "mse"
    if are_flags(targets):
        if targets.dim() == 2:
            return "bce"
        ways = (
            "'--loss bce' for labels of which any number may hold, '--loss cross_entropy' where one of them "
            "holds, '--data.classes 2' where every position, such as a token, has a class"
        )
    elif not_shares(targets):
        return "mse"
    else:
        ways = "'--loss cross_entropy' for shares of classes"
    raise BadOption(
        f"the targets are floats from {float(targets.min()):g} to {float(targets.max()):g}, which may be "
        f"labels or numbers to predict; say what they are: {ways}, or '--loss mse' for regression"
    )


def are_flags(targets: Tensor) -> bool:
    """Return whether float targets are all 0 or 1, one or several for each sample."""
    return bool(((targets == 0) | (targets == 1)).all())


def not_shares(targets: Tensor) -> str | None:
    """Return why float targets of shape (n, classes, *rest) are not shares of classes; None: they are."""
    if targets.dim() < 2 or targets.shape[1] < 2:
        return "there is one number for each sample"
    below = (targets < 0).flatten(1).any(1)
    if below.any():
        return f"sample {int(below.int().argmax())} has one below 0"
    off = ((targets.sum(1, dtype=torch.float64) - 1).abs() > ROUNDING).reshape(len(targets), -1).any(1)
    if off.any():
        return f"the shares of sample {int(off.int().argmax())} do not add up to 1"
    return None


@dataclass(frozen=True)
class Reading:
    """The meaning of the outputs and targets of a run."""

    kind: str  # of the targets: `CLASSES`, `FLAGS`, `SHARES` or `AMOUNTS`
    columns: int  # the number of classes, or of flags for each sample
    loss: str  # its name
    amounts: bool  # whether outputs approach the class number or the flag itself, and are no logits
    targets: Tensor  # of the training part

    @classmethod
    def of(cls, dataset: DataSet, loss: str, labels: bool, amounts: bool) -> Reading:
        """Return the reading of a run whose loss may be on `labels`, or approach `amounts`."""
        targets = dataset.train.targets
        if not targets.is_floating_point():
            return cls(CLASSES, dataset.classes or int(targets.max()) + 1, loss, amounts, targets)
        kind = SHARES if labels else FLAGS if are_flags(targets) else AMOUNTS
        numbers = targets[0].numel()
        return cls(kind, 2 if kind == FLAGS and numbers == 1 else numbers, loss, amounts, targets)

    @property
    def several(self) -> bool:
        """True if each sample has several flags; a single one is class 0 or 1."""
        return self.kind == FLAGS and self.targets[0].numel() > 1

    def decisions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes, int64, one for each label.

        With several flags for each sample, return booleans of shape (n, flags).
        """
        found = predicted(outputs, targets, self.amounts)
        if self.several:
            return (found > 0).flatten(1), (targets > 0).flatten(1)
        return found.flatten(), targets.flatten().long()

    def probabilities(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float64 probabilities of the classes, of shape (labels, classes), and the true classes.

        With several flags for each sample, both are of shape (n, flags). Outputs that approach numbers stay
        as they are, as their order is the same.
        """
        scores = outputs.double()
        if self.kind == CLASSES and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
            rows = scores.movedim(1, -1).flatten(0, -2)
            if not self.amounts:
                ways = {"nll": torch.exp, "bce": torch.sigmoid}
                rows = ways[self.loss](rows) if self.loss in ways else rows.softmax(1)
            return rows, targets.flatten()
        if self.kind == CLASSES and self.columns > 2:
            raise BadModel(
                f"one score for each of {self.columns} classes is needed, not outputs of shape "
                f"{tuple(outputs.shape)}"
            )
        scores = scores if self.amounts else scores.sigmoid()
        if self.several:
            return scores.flatten(1), (targets > 0).flatten(1)
        scores = scores.flatten()
        return torch.stack([1 - scores, scores], 1), targets.flatten().long()


def predicted(outputs: Tensor, targets: Tensor, amounts: bool = False) -> Tensor:
    """Return the predicted classes: the largest score; for a single logit, whether it is above 0.

    Outputs have shape (n, ...) or (n, classes, ...), targets (n, ...). With `amounts` a single output
    approaches the class number, and the nearest class is predicted.
    """
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    if amounts:
        return outputs.round().clamp(min=0).reshape(targets.shape).to(torch.int64)
    return (outputs > 0).reshape(targets.shape).to(torch.int64)


def spread(targets: Tensor, *weights: Tensor) -> list[Tensor]:
    """Return sample weights, of shape (n,), as weights of the targets (n, *rest), on their device."""
    shape = -1, *[1] * (targets.dim() - 1)
    return [one.to(targets.device).reshape(shape).expand_as(targets) for one in weights]


def labelled(ignored: int | None, outputs: Tensor, targets: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of outputs (n, classes, *rest), targets (n, *rest) and weights whose label counts."""
    if ignored is None:
        return outputs, targets, *weights
    rows = outputs.movedim(1, -1).flatten(0, -2) if outputs.dim() > targets.dim() else outputs.flatten()
    kept = targets.flatten() != ignored
    return rows[kept], *(one.flatten()[kept] for one in (targets, *spread(targets, *weights)))
