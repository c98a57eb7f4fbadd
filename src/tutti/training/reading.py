"""The meaning of a model's outputs: classes, labels of 0 or 1, or amounts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tutti.data.parts import DataSet
from tutti.errors import BadModel
from tutti.training.losses import Loss
from tutti.training.target_kinds import are_flags

CLASSES: Final = "classes"
FLAGS: Final = "flags"
SHARES: Final = "shares"
AMOUNTS: Final = "amounts"


@dataclass(frozen=True)
class Reading:
    """The meaning of the outputs and targets of a run.

    Attributes:
        kind: of the targets: `CLASSES`, `FLAGS` (one or several labels of 0 or 1 for each sample), `SHARES`
            of classes, or `AMOUNTS`.
        columns: how many classes there are, of several flags for each sample how many.
        loss: its name.
        amounts: whether outputs approach the class number or the flag itself, and are no logits.
        targets: of the training part.
    """

    kind: str
    columns: int
    loss: str
    amounts: bool
    targets: Tensor

    @classmethod
    def of(cls, loss: Loss, dataset: DataSet) -> Reading:
        """Return that of a run."""
        targets = dataset.train.targets
        if not targets.is_floating_point():
            columns = dataset.classes or int(targets.max()) + 1
            return cls(CLASSES, columns, loss.name, loss.amounts, targets)
        kind = SHARES if loss.labels else FLAGS if are_flags(targets) else AMOUNTS
        numbers = targets[0].numel()
        columns = 2 if kind == FLAGS and numbers == 1 else numbers
        return cls(kind, columns, loss.name, loss.amounts, targets)

    @property
    def several(self) -> bool:
        """True if each sample has several flags; a single one is taken for class 0 or 1."""
        return self.kind == FLAGS and self.targets[0].numel() > 1

    def decisions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes, int64, one for each label; a single flag is class 0 or 1.

        Of several flags for each sample what is predicted and true, booleans of shape (n, flags).
        """
        found = predicted(outputs, targets, self.amounts)
        if self.several:
            return (found > 0).flatten(1), (targets > 0).flatten(1)
        return found.flatten(), targets.flatten().long()

    def probabilities(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class, float64, of shape (labels, classes), and the true classes.

        Of several flags for each sample those of the flags, of shape (n, flags), and what is true. Outputs
        that approach numbers are taken as they are: their order is that of probabilities.

        Raises:
            BadModel: the outputs are no scores of classes.
        """
        scores = outputs.double()
        if self.kind == CLASSES and outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
            return self._of_classes(scores.movedim(1, -1).flatten(0, -2)), targets.flatten()
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

    def _of_classes(self, scores: Tensor) -> Tensor:
        if self.amounts:
            return scores
        if self.loss == "nll":
            return scores.exp()
        return scores.sigmoid() if self.loss == "bce" else scores.softmax(1)


def predicted(outputs: Tensor, targets: Tensor, amounts: bool = False) -> Tensor:
    """Return the class that each output means: the largest score; of a single logit, whether it is above 0.

    Args:
        outputs: of shape (n, ...), or (n, classes, ...).
        targets: of shape (n, ...).
        amounts: a single output is no logit, but the class number itself: the nearest one is meant.
    """
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    if amounts:
        return outputs.round().clamp(min=0).reshape(targets.shape).to(torch.int64)
    return (outputs > 0).reshape(targets.shape).to(torch.int64)


def labelled(outputs: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Outputs and targets of what has a label, one row for each; everything where `ignored` is None.

    Args:
        outputs: of shape (n, classes, *rest).
        targets: of shape (n, *rest), integers.
        ignored: the label that means that there is none.
    """
    if ignored is None:
        return outputs, targets
    rows = outputs.movedim(1, -1).flatten(0, -2) if outputs.dim() > targets.dim() else outputs.flatten()
    kept = targets.flatten() != ignored
    return rows[kept], targets.flatten()[kept]
