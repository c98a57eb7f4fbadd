"""The units of amounts: a network is trained in standard deviations from the mean of the training targets.

    the network's outputs   z
    for the gradient        loss(z, (target - mean) / std)
    reported                loss(mean + std z, target)          metrics and predictions likewise

So targets of any size have gradients of about 1, and every figure is in the unit of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.errors import BadModel
from tutti.records.preparation import Preparation

DISTANCES: Final = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
"""The losses of torch that are computed in standard deviations. Others, such as of counts (poisson_nll_loss)
or of a deviation (gaussian_nll_loss), and functions of the user's, depend on the unit: nothing is scaled."""

_MODULES: Final = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


@dataclass(frozen=True)
class Units:
    """Mean and standard deviation of the training targets, for each number of a target."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    _tensors: dict[object, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, preparation: Preparation | None) -> Units | None:
        """Return the units in which a model computes; None: the targets' own."""
        units = None if preparation is None else preparation.units
        return None if units is None else cls(units.mean, units.std)

    def outputs(self, standardised: Tensor) -> Tensor:
        """Return a network's outputs, of shape (n, ...), in the unit of the targets."""
        mean, std = self._for(standardised)
        return standardised * std + mean

    def standardised(self, targets: Tensor) -> Tensor:
        """Return targets, of shape (n, ...), in standard deviations from their mean."""
        mean, std = self._for(targets)
        return (targets - mean) / std

    def _for(self, rows: Tensor) -> tuple[Tensor, Tensor] | tuple[float, float]:
        shape = rows.shape[1:]
        if shape.numel() != len(self.mean):
            raise BadModel(
                f"the model's outputs have shape {tuple(rows.shape)}, but a target has "
                f"{len(self.mean):,} numbers; give the model that many outputs"
            )
        if len(self.mean) == 1:
            return self.mean[0], self.std[0]
        key = shape, rows.dtype, rows.device
        if key not in self._tensors:
            mean, std = (
                torch.tensor(one, dtype=rows.dtype, device=rows.device) for one in (self.mean, self.std)
            )
            self._tensors[key] = mean.view(shape), std.view(shape)
        return self._tensors[key]


def is_distance(function: object) -> bool:
    """Return whether a function, a partial or a torch module is one of `DISTANCES`."""
    function = function.func if isinstance(function, partial) else function
    return function in DISTANCES or isinstance(function, _MODULES)
