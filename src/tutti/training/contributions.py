"""Contributions to updates that are not finite: named, and left out.

Where workers make an update together, it is the mean over the samples of those whose gradient is finite:

    rank 0   backward │ finite     │ share left out │ g * 1 / (1 - share left out) │ step
    rank 1   backward │ nan: g = 0 │ share left out │                              │ step

Otherwise such a worker makes no step of its own, and sends nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import NotFinite
from tutti.replica import Replica, copy_all
from tutti.training.finite_check import REMEDY

_Place = tuple[nn.Module, str]

SAID: Final = 3
"""Each rank tells of so many contributions one by one, and of later ones by powers of two."""


class Contributions:
    """The gradients that a rank contributes, each of which is looked at.

    What a forward pass of NaN has left in the model's buffers is taken back, too.

    Args:
        replica: has the gradients.
        comm: the workers.
        most: how many in a row may be left out.

    Attributes:
        left_out: how many were left out since `take`.
    """

    def __init__(self, replica: Replica, comm: Communicator, most: int) -> None:
        self._replica, self._comm, self._most = replica, comm, most
        self._buffers = [vector.clone() for vector in replica.buffers]
        # The module may set them to other tensors, which are in none of the vectors.
        self._first = dict(_buffers_of(replica.module))
        self._assigned: dict[_Place, Tensor | None] = {}
        self._loss: float | None = None
        self._in_row = self.left_out = self._ever = 0

    def note_loss(self, loss: float) -> None:
        """Take note of a loss that is not finite; the gradient of the update is then left out."""
        self._loss = loss

    def is_finite(self, step: int, epoch: int) -> bool:
        """Tell whether this rank's gradient can be used; else it is zero now, and the user knows.

        Args:
            step: that it is for, from 1.
            epoch: from 0.

        Raises:
            NotFinite: more in a row than may be left out are not finite.
        """
        if self._loss is None and self._replica.gradients.is_finite():
            self._in_row = 0
            self.keep_buffers()
            return True
        what = f"{self._what()} in step {step} (epoch {epoch + 1}) on rank {self._comm.rank}"
        self._in_row += 1
        if self._in_row > self._most:
            allowed = f"--skip-nonfinite allows {self._most} in a row"
            raise NotFinite(f"{what}; {allowed}, and this is the next one. {REMEDY}")
        self.left_out += 1
        self._ever += 1
        if self._ever <= SAID or self._ever & (self._ever - 1) == 0:
            print(
                f"tutti: warning: {what}: its contribution is left out, the {_nth(self._ever)} of this rank",
                file=sys.stderr,
                flush=True,
            )
        self._drop()
        return False

    def rest(self, finite: bool, share: float) -> float:
        """Return the share of an update that its finite gradients have (collective over the workers).

        Args:
            finite: whether this rank's is.
            share: that it has of the update's samples.

        Returns:
            1 if nothing is left out, without rounding; 0 if nothing is left.
        """
        lost = torch.tensor([0.0 if finite else share, float(finite and share > 0)], dtype=torch.float64)
        self._comm.all_reduce(lost)
        left_out, givers = lost.tolist()
        return 1.0 - left_out if givers else 0.0

    def take(self) -> int:
        """Return how many were left out since this was last asked."""
        taken, self.left_out = self.left_out, 0
        return taken

    def state(self) -> list[int]:
        """Return how many were left out so far: in a row, since `take`, and ever."""
        return [self._in_row, self.left_out, self._ever]

    def load_state(self, counts: int | list[int]) -> None:
        """Go on from an earlier state, with the buffers that the replica has now.

        Args:
            counts: what `state` gave; earlier versions had those in a row alone.
        """
        self._in_row, self.left_out, self._ever = counts if isinstance(counts, list) else (counts, 0, 0)
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Go back to the buffers as they are now, should the next gradient be left out."""
        copy_all(self._buffers, self._replica.buffers)
        self._assigned = {place: None if now is None else now.clone() for place, now in self._others()}

    def _what(self) -> str:
        broken = self._replica.first_not_finite(gradients=False)
        why = "" if broken is None else f"; parameter '{broken}' itself is no longer finite"
        if self._loss is not None:
            return f"the loss is {self._loss}{why}"
        name = self._replica.first_not_finite(weights=False)
        return f"the gradient of '{name}' is not finite, though the loss is{why}"

    def _drop(self) -> None:
        self._loss = None
        self._replica.gradients.zero()
        copy_all(self._replica.buffers, self._buffers)
        for (module, name), now in self._others():
            kept = self._assigned.get((module, name))
            module._buffers[name] = self._first.get((module, name), now) if kept is None else kept.clone()

    def _others(self) -> Iterator[tuple[_Place, Tensor | None]]:
        """The buffers that are other tensors than they were at first."""
        for place, now in _buffers_of(self._replica.module):
            if now is not self._first.get(place):
                yield place, now


def _buffers_of(whole: nn.Module) -> Iterator[tuple[_Place, Tensor | None]]:
    for module in whole.modules():
        for name, buffer in module._buffers.items():
            yield (module, name), buffer


def _nth(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number:,}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
