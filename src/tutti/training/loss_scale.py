"""The scale of the loss in half precision, which keeps small gradients from being rounded to zero."""

from __future__ import annotations

from typing import Final

from tutti.state import Values

FIRST: Final = 2.0**16
"""The scale at first: torch.amp.GradScaler's, as is the number below."""

GROWS_AFTER: Final = 2000
"""So many steps in turn without an overflow double the scale."""


class LossScale:
    """A factor of the loss that follows the gradients.

        backward(scale * loss), then gradient / scale
        an overflow: no step, scale / 2;   2,000 steps without one: scale * 2

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the numbers are those of
    `torch.amp.GradScaler`.

    Attributes:
        factor: that the loss is to be multiplied by.
    """

    def __init__(self) -> None:
        self.factor, self._good = FIRST, 0

    def follow(self, usable: bool) -> None:
        """Adapt to an update: whether it was made, or skipped because of an overflow."""
        self._good += 1
        if not usable:
            self.factor, self._good = self.factor / 2, 0
        elif self._good == GROWS_AFTER:
            self.factor, self._good = 2 * self.factor, 0

    def state(self) -> Values:
        """Return what must be known to go on from here."""
        return {"factor": self.factor, "good": self._good}

    def load_state(self, values: Values) -> None:
        """Go on from an earlier state."""
        self.factor, self._good = values["factor"], values["good"]
