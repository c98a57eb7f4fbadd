"""The check that the losses of a GPU stay finite, some steps late: reading the newest would mean to wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

EVERY: Final = 50
"""Steps from one look to the next."""


@dataclass(frozen=True)
class RunningSum:
    """A running sum, as it was after some step.

    Attributes:
        total: the sum after step `last`.
        first: the first step since the look before; steps are counted from 1.
        last: the last one.
    """

    total: float
    first: int
    last: int


@dataclass(frozen=True)
class _Asked:
    """A value that is on its way from the GPU."""

    copy: Tensor
    there: torch.cuda.Event | None
    first: int
    last: int


class FiniteCheck:
    """A look at a running sum now and then, each time at what it was the time before.

        CPU    tells 1 to 50 │ tells 51 to 100 │ waits for 50, tells 101 to 150 │ waits for 100, tells ...
        GPU       does 1 to 50     │ does 51 to 100     │ does 101 to 150     │ ...

    The GPU has something to do meanwhile, and the CPU is never more than two such stretches ahead.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._looked = every, 0
        self._asked: _Asked | None = None

    def note(self, total: Tensor, step: int) -> RunningSum | None:
        """Look, if it is time to.

        Args:
            total: the sum, a scalar which later steps may add to in place.
            step: the number of the step just told, from 1; consecutive.

        Returns:
            What the sum was the last time but one, if anything.
        """
        if step - self._looked < self._every:
            return None
        before, self._asked = self._asked, _ask(total, self._looked + 1, step)
        self._looked = step
        if before is None:
            return None
        if before.there is not None:
            before.there.synchronize()
        return RunningSum(before.copy.item(), before.first, before.last)

    def last(self, total: Tensor, step: int) -> RunningSum:
        """The sum after this step; waits for it."""
        first = self._asked.first if self._asked is not None else self._looked + 1
        self._asked, self._looked = None, step
        return RunningSum(total.item(), min(first, step), step)


def _ask(total: Tensor, first: int, last: int) -> _Asked:
    """Have a copy of the sum, as it is now, sent to the CPU."""
    copy = torch.empty((), dtype=total.dtype, pin_memory=total.is_cuda)
    copy.copy_(total, non_blocking=True)
    there = None
    if total.is_cuda:
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
    return _Asked(copy, there, first, last)
