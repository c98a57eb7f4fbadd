"""Losses on labels: one score for each class."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional

from tutti.registry import part
from tutti.training.losses import Loss, built_in, check_option, class_scores
from tutti.training.losses.denominators import LossFunction
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
def cross_entropy(smoothing: float = 0.0) -> Loss:
    """Cross entropy of class scores (logits); labels, which may be smoothed, or shares of the classes."""
    check_option("cross_entropy", "smoothing", smoothing, 0, 1)
    function: LossFunction = functional.cross_entropy
    if smoothing:
        function = partial(functional.cross_entropy, label_smoothing=smoothing)
    return Loss("cross_entropy", function, class_scores, labels=True, floats=_not_shares)


@part("nll")
@built_in
def nll() -> Loss:
    """Negative log-likelihood of logarithms of probabilities."""
    return Loss("nll", functional.nll_loss, class_scores, labels=True, floats=_no_labels)
