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
        first: the first step since the look before; steps are counted from 1.
        last: the last one.
        value: the sum after that, a scalar, which may be on its way from the GPU.
        there: comes when it is there; None: it is.
    """

    first: int
    last: int
    value: Tensor
    there: torch.cuda.Event | None = None

    @property
    def total(self) -> float:
        """The sum after step `last`; waits for it."""
        if self.there is not None:
            self.there.synchronize()
        return self.value.item()


class FiniteCheck:
    """A look at a running sum now and then, each time at what it was the time before.

        CPU    tells 1 to 50 │ tells 51 to 100 │ waits for 50, tells 101 to 150 │ waits for 100, tells ...
        GPU       does 1 to 50     │ does 51 to 100     │ does 101 to 150     │ ...

    The GPU has something to do meanwhile, and the CPU is never more than two such stretches ahead.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._looked = every, 0
        self._asked: RunningSum | None = None

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
        return before

    def last(self, total: Tensor, step: int) -> RunningSum:
        """The sum after this step."""
        first = self._asked.first if self._asked is not None else self._looked + 1
        self._asked, self._looked = None, step
        return RunningSum(min(first, step), step, total)


def _ask(total: Tensor, first: int, last: int) -> RunningSum:
    """Have a copy of the sum, as it is now, sent to the CPU."""
    copy = torch.empty((), dtype=total.dtype, pin_memory=total.is_cuda)
    copy.copy_(total, non_blocking=True)
    there = None
    if total.is_cuda:
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
    return RunningSum(first, last, copy, there)
