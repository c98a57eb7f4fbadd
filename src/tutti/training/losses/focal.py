"""The focal loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tutti.registry import part
from tutti.training.losses import Loss, built_in, check_option, class_scores, same_shape
from tutti.training.losses.bce import of_each, outside
from tutti.training.losses.denominators import focal as of_classes


def _of_flags(gamma: float, outputs: Tensor, targets: Tensor) -> Tensor:
    each = of_each(outputs, targets)
    return each * (-torch.expm1(-each)).clamp(min=torch.finfo(each.dtype).tiny) ** gamma


def _fit(outputs: Tensor, targets: Tensor, classes: int | None) -> str | None:
    return (same_shape if targets.is_floating_point() else class_scores)(outputs, targets, classes)


@part("focal")
@built_in
def focal(gamma: float = 2.0) -> Loss:
    """Focal loss: (binary) cross entropy in which labels that are predicted well count little.

    Lin, Goyal, Girshick, He, Dollár: Focal Loss for Dense Object Detection, ICCV 2017, equation 4. Gamma is 2
    there, too; for alpha there are class weights.
    """
    check_option("focal", "gamma", gamma, 0)
    function, each = partial(of_classes, gamma=gamma), partial(_of_flags, gamma)
    return Loss("focal", function, _fit, labels=True, floats=outside, each=each)
