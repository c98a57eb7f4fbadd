"""Updates whose gradient is not finite: skipped by all ranks that make them together, and counted.

    rank 0   backward │ finite │ is it on all ranks? │ gradient = 0, statistics as before │ next forward
    rank 1   backward │ nan    │ is it on all ranks? │ gradient = 0, statistics as before │ next forward

A worker with steps of its own skips its own.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import NotFinite
from tutti.replica import Replica
from tutti.training.finite_check import REMEDY
from tutti.training.loss_scale import LossScale

SAID: Final = 3
"""Each rank tells of so many gradients one by one, and of later ones by powers of two."""

OVERFLOWS: Final = 30
"""The most overflows in a row in half precision: a scale of the loss that is smaller still does not help."""


class SkippedUpdates:
    """Decides which updates are skipped.

    Args:
        replica: has the gradients.
        comm: the workers.
        together: whether they skip an update together.
        most: how many in a row may be skipped; 0: no gradient is looked at, unless the loss is scaled.
        scale: of the loss, in half precision; its overflows are no fault, so nothing is said of them.

    Attributes:
        catches_losses: whether an update is skipped whose loss is not finite.
        left_out: how many gradients of this rank were not finite since `take`.
    """

    def __init__(
        self, replica: Replica, comm: Communicator, together: bool, most: int, scale: LossScale | None = None
    ) -> None:
        self._replica, self._comm, self._together, self._scale = replica, comm, together, scale
        self._most, self.catches_losses = most if scale is None else OVERFLOWS, most > 0
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._loss: float | None = None
        self._in_row = self.left_out = self._ever = 0
        self.keep_buffers()

    def note_loss(self, loss: float) -> None:
        """Take note of a loss that is not finite; the update is then skipped."""
        self._loss = loss

    def is_usable(self, step: int, epoch: int) -> bool:
        """Return whether the update can be made (collective where it is made together).

        Otherwise the gradient is zero now, and what the forward pass has left in buffers is taken back.

        Args:
            step: of the update, from 1.
            epoch: from 0.

        Raises:
            NotFinite: more in a row than may be skipped are not finite.
        """
        if not self._most:
            return True
        if self._scale is not None:
            self._replica.gradients.scale(1 / self._scale.factor)
        finite = self._loss is None and self._replica.gradients.is_finite()
        if not finite:
            self._note(f"{self._what()} in step {step} (epoch {epoch + 1}) on rank {self._comm.rank}")
        usable = self._is_finite_everywhere(finite) if self._together else finite
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
        """Return how many gradients of this rank were not finite since this was last asked."""
        taken, self.left_out = self.left_out, 0
        return taken

    def state(self) -> list[int]:
        """Return how many were not finite so far: in a row, since `take`, and ever."""
        return [self._in_row, self.left_out, self._ever]

    def load_state(self, counts: list[int]) -> None:
        """Go on from what `state` gave, with the buffers that the replica has now."""
        self._in_row, self.left_out, self._ever = counts
        self.keep_buffers()

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Go back to the buffers as they are now, should the next update be skipped."""
        if self.catches_losses:
            self._kept = [
                (module, name, buffer, buffer.clone())
                for module in self._replica.module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]

    def _is_finite_everywhere(self, finite: bool) -> bool:
        spoiled = torch.tensor([float(not finite)])
        self._comm.all_reduce(spoiled)
        return not spoiled.item()

    def _note(self, what: str) -> None:
        if self._in_row == self._most:
            allowed = "--skip-nonfinite" if self._scale is None else "--precision fp16"
            raise NotFinite(f"{what}; {allowed} skips {self._most} updates in a row at most. {REMEDY}")
        self.left_out += 1
        self._ever += 1
        if self._scale is None and (self._ever <= SAID or self._ever & (self._ever - 1) == 0):
            said = f"{what}: the update is skipped, the {_nth(self._ever)} by this rank"
            print(f"tutti: warning: {said}", file=sys.stderr, flush=True)

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
        # The module may have put other tensors in their place.
        for module, name, buffer, values in self._kept:
            module._buffers[name] = buffer.copy_(values)


def _nth(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number:,}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
