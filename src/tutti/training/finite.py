"""Losses, gradients and weights that are not finite: errors, and updates that are skipped.

    rank 0   backward │ finite │ is it on all ranks? │ gradient = 0, statistics as before │ next forward
    rank 1   backward │ nan    │ is it on all ranks? │ gradient = 0, statistics as before │ next forward

Workers that step alone skip alone. In half precision the loss has a scale, which keeps small gradients from
being rounded to zero; an overflow skips the update and halves the scale.
"""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import NotFinite
from tutti.replica import Replica
from tutti.state import Values
from tutti.terminal import warn_on_stderr

OVERFLOWS: Final = 30
"""The most overflows in a row in half precision; a still smaller scale would not help."""

REMEDY: Final = (
    "Lower the learning rate (--lr), clip the gradient (--clip-norm 1), skip such updates "
    "(--skip-nonfinite 10, which names the rank), or look for such values in the data."
)
"""Advice for a run whose numbers are not finite."""


class LossScale:
    """A factor of the loss that follows the gradients.

        backward(scale * loss), then gradient / scale
        an overflow: no step, scale / 2;   2,000 steps without one: scale * 2

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the numbers are those of
    `torch.amp.GradScaler`. `factor` multiplies the loss.
    """

    FIRST: Final = 2.0**16
    GROWS_AFTER: Final = 2000

    def __init__(self) -> None:
        self.factor, self._good = self.FIRST, 0

    def follow(self, usable: bool) -> None:
        """Adapt to an update that was made, or skipped because of an overflow."""
        self._good += 1
        if not usable:
            self.factor, self._good = self.factor / 2, 0
        elif self._good == self.GROWS_AFTER:
            self.factor, self._good = 2 * self.factor, 0

    def state(self) -> Values:
        """Return the state to continue from."""
        return {"factor": self.factor, "good": self._good}

    def load_state(self, values: Values) -> None:
        """Continue from an earlier state."""
        self.factor, self._good = values["factor"], values["good"]


class SkippedUpdates:
    """Decides which updates to skip: at most `most` in a row, by the ranks `together` or alone.

    Overflows of a scaled loss cause no warning.

    Attributes:
        catches_losses: whether a loss that is not finite skips the update, too.
        left_out: the number of this rank's gradients since `take` that were not finite.
        warned: whether further warnings are suppressed.
    """

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        together: Communicator | None,
        most: int,
        scale: LossScale | None = None,
    ) -> None:
        self._replica, self._comm, self._together, self._scale = replica, comm, together, scale
        self._most, self.catches_losses = most if scale is None else OVERFLOWS, most > 0
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._loss: float | None = None
        self._in_row = self.left_out = 0
        self.warned = scale is not None
        self.keep_buffers()

    def note_loss(self, loss: float) -> None:
        """Note a loss that is not finite; the update is then skipped."""
        self._loss = loss

    def is_usable(self, step: int, epoch: int) -> bool:
        """Return whether the update can be made (collective where it is made together).

        Otherwise zero the gradient, and restore the buffers from before the forward pass.
        """
        if not self._most:
            return True
        if self._scale is not None:
            self._replica.gradients.scale(1 / self._scale.factor)
        usable = self._loss is None and self._replica.gradients.is_finite()
        if not usable:
            self._note(f"{self._what()} in step {step} (epoch {epoch + 1}) on rank {self._comm.rank}")
        if self._together is not None:
            spoiled = torch.tensor([float(not usable)])
            self._together.all_reduce(spoiled)
            usable = not spoiled.item()
        if self._scale is not None:
            self._scale.follow(usable)
        if usable:
            self._in_row = 0
            self.keep_buffers()
        else:
            self._in_row += 1
            self._drop()
        return usable

    def take(self) -> int:
        """Return `left_out`, and count from zero again."""
        taken, self.left_out = self.left_out, 0
        return taken

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Copy the buffers; a skipped update restores them."""
        if self.catches_losses:
            self._kept = [
                (module, name, buffer, buffer.clone())
                for module in self._replica.module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]

    def _note(self, what: str) -> None:
        if self._in_row == self._most:
            allowed = "--skip-nonfinite" if self._scale is None else "--precision fp16"
            raise NotFinite(f"{what}; {allowed} skips {self._most} updates in a row at most. {REMEDY}")
        self.left_out += 1
        if not self.warned:
            self.warned = True
            warn_on_stderr(f"{what}: the update is skipped; the records count further ones of this rank")

    def _what(self) -> str:
        broken = self._replica.first_not_finite(gradients=False)
        why = "" if broken is None else f"; parameter '{broken}' itself is no longer finite"
        if self._loss is not None:
            return f"the loss is {self._loss}{why}"
        name = self._replica.first_not_finite(weights=False)
        return f"the gradient of '{name}' is not finite, though the loss is{why}"

    @torch.no_grad()
    def _drop(self) -> None:
        self._loss = None
        self._replica.gradients.zero()
        # The module may have replaced a tensor.
        for module, name, buffer, values in self._kept:
            module._buffers[name] = buffer.copy_(values)


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
