"""Metrics of predicted classes."""

from __future__ import annotations

from torch import Tensor

from tutti.errors import BadModel
from tutti.registry import part
from tutti.training.metrics import built_in, predicted


@part("accuracy")
@built_in(better="higher")
def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the labels that are predicted."""
    return predicted(outputs, targets) == targets


@part("top5")
@built_in(better="higher")
def top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the labels that are among the five largest scores."""
    if outputs.dim() != targets.dim() + 1 or outputs.shape[1] == 1:
        raise BadModel(
            f"metric 'top5' needs one score for each class, not outputs of shape {tuple(outputs.shape)}"
        )
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return (best == targets.unsqueeze(1)).any(1)
