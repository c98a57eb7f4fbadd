"""Losses, gradients and weights that are not finite: errors, and the scale of the loss in half precision."""

from __future__ import annotations

from typing import Final, NoReturn

import torch

from tutti.comm.base import Communicator
from tutti.errors import NotFinite
from tutti.replica import Replica
from tutti.state import Values

OVERFLOWS: Final = 30
"""The most overflows in a row in half precision; a still smaller scale would not help."""

REMEDY: Final = (
    "Lower the learning rate (--lr), clip the gradient (--clip-norm 1), or look for such values in the data."
)
"""Advice for a run whose numbers are not finite."""


class LossScale:
    """A factor of the loss in half precision, which keeps small gradients from being rounded to zero.

        backward(scale * loss), then gradient / scale
        an overflow: no step, scale / 2;   2,000 steps without one: scale * 2

    Workers that step together skip together; a worker with steps of its own skips alone.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the numbers are those of
    `torch.amp.GradScaler`. `factor` multiplies the loss.
    """

    FIRST: Final = 2.0**16
    GROWS_AFTER: Final = 2000

    def __init__(self, replica: Replica, comm: Communicator, together: bool) -> None:
        self._replica, self._comm, self._together = replica, comm, together
        self.factor, self._good, self._in_row = self.FIRST, 0, 0

    def is_usable(self, step: int, epoch: int) -> bool:
        """Divide the gradient by the scale; return whether the update can be made (collective if together).

        Otherwise the gradient is zero now.
        """
        gradients = self._replica.gradients
        gradients.scale(1 / self.factor)
        usable = gradients.is_finite()
        if self._together:
            spoiled = torch.tensor([float(not usable)])
            self._comm.all_reduce(spoiled)
            usable = not spoiled.item()
        self._follow(usable)
        if self._in_row > OVERFLOWS:
            name = self._replica.first_not_finite()
            where = "" if name is None else f": '{name}' is not finite"
            raise NotFinite(
                f"more than {OVERFLOWS} updates in a row overflow in half precision, the last in step {step} "
                f"(epoch {epoch + 1}) on rank {self._comm.rank}{where}. {REMEDY}"
            )
        if not usable:
            gradients.zero()
        return usable

    def _follow(self, usable: bool) -> None:
        """Adapt to an update that is made, or skipped because of an overflow."""
        self._good += 1
        self._in_row += 1
        if not usable:
            self.factor, self._good = self.factor / 2, 0
            return
        self._in_row = 0
        if self._good == self.GROWS_AFTER:
            self.factor, self._good = 2 * self.factor, 0

    def state(self) -> Values:
        """Return the state to go on from."""
        return {"factor": self.factor, "good": self._good}

    def load_state(self, values: Values) -> None:
        """Go on from an earlier state."""
        self.factor, self._good = values["factor"], values["good"]


def refuse_loss(replica: Replica, rank: int, loss: float, epoch: int, steps: str) -> NoReturn:
    """Raise NotFinite for a loss in some steps of an epoch (from 0) on a rank."""
    name = replica.first_not_finite()
    where = "all weights and gradients are finite"
    if name is not None:
        where = f"the first parameter that is not finite, in gradient or weight, is '{name}'"
    raise NotFinite(
        f"the loss became {loss} in {steps} (epoch {epoch + 1}) on rank {rank}; {where}. {REMEDY}"
    )


def refuse_broken_weights(replica: Replica, rank: int, step: int) -> None:
    """Raise NotFinite if the last update has broken the weights."""
    name = replica.first_not_finite()
    if name is not None:
        raise NotFinite(
            f"parameter '{name}' is no longer finite after step {step} on rank {rank}, though the loss was. "
            f"{REMEDY}"
        )
