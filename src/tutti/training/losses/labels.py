"""Losses on labels: one score for each class."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, built_in, class_scores
from tutti.training.target_kinds import not_shares


def _not_shares(targets: Tensor) -> str | None:
    reason = not_shares(targets)
    if reason is None:
        return None
    return (
        "needs class numbers, or shares of the classes that add up to 1 for each sample, but the targets are "
        f"floats, and {reason}; give --data.classes N if they are class numbers, '--loss bce' for labels of "
        "which any number may hold, or '--loss mse' for amounts"
    )


def _no_labels(targets: Tensor) -> str | None:
    return (
        "needs class numbers, but the targets are floats; give --data.classes N if they are class numbers, "
        "or another loss"
    )


@part("cross_entropy")
@built_in
def cross_entropy() -> Loss:
    """Cross entropy of class scores (logits); labels, or shares of the classes."""
    return Loss("cross_entropy", functional.cross_entropy, class_scores, labels=True, floats=_not_shares)


@part("nll")
@built_in
def nll() -> Loss:
    """Negative log-likelihood of logarithms of probabilities."""
    return Loss("nll", functional.nll_loss, class_scores, labels=True, floats=_no_labels)
