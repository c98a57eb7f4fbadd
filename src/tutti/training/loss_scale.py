"""The scale of the loss in half precision, which keeps small gradients from being rounded to zero."""

from __future__ import annotations

from typing import Final

import torch

from tutti.comm.base import Communicator
from tutti.replica import Replica
from tutti.state import Values

FIRST: Final = 2.0**16
"""The scale at first: torch.amp.GradScaler's, as are the two below."""

LEAST: Final = 2.0**-14
"""The scale below which a smaller one does not help: gradients are not finite for another reason."""

GROWS_AFTER: Final = 2000
"""So many steps in turn without an overflow double the scale."""


class LossScale:
    """A factor of the loss that follows the gradients.

        backward(scale * loss), then gradient / scale
        an overflow: no step, scale / 2;   2,000 steps without one: scale * 2

    Where workers make a step together, an overflow on one of them is one on all.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the numbers are those of
    `torch.amp.GradScaler`.

    Args:
        replica: has the gradients.
        comm: the workers that make each step together; None: each makes its own.

    Attributes:
        factor: that the loss is to be multiplied by.
    """

    def __init__(self, replica: Replica, comm: Communicator | None) -> None:
        self._gradients, self._comm = replica.gradients, comm
        self.factor, self._good = FIRST, 0

    def unscale(self) -> bool:
        """Divide the gradients by the factor; returns whether a step can be made by them (collective).

        Otherwise they are zero, and the factor is smaller.
        """
        self._gradients.scale(1 / self.factor)
        overflown = torch.tensor([not self._gradients.is_finite()]).float()
        if self._comm is not None:
            self._comm.all_reduce(overflown)
        if overflown.item() and self.factor > LEAST:
            self._gradients.zero()
            self.factor, self._good = self.factor / 2, 0
            return False
        self._good += 1
        if self._good == GROWS_AFTER:
            self.factor, self._good = 2 * self.factor, 0
        return True

    def state(self) -> Values:
        """Return what must be known to go on from here."""
        return {"factor": self.factor, "good": self._good}

    def load_state(self, values: Values) -> None:
        """Go on from an earlier state."""
        self.factor, self._good = values["factor"], values["good"]
