"""The check that losses and weights stay finite, and what is said when they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from tutti.errors import NotFinite
from tutti.replica import Replica

EVERY: Final = 50
"""Steps from one look to the next."""

REMEDY: Final = (
    "Lower the learning rate (--lr), clip the gradient (--clip-norm 1), or look for such values in the data."
)
"""Advice for a run whose numbers are not finite."""


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
    """A look at the sum of a GPU's losses now and then, each time at what it was the time before.

        CPU    tells 1 to 50 │ tells 51 to 100 │ waits for 50, tells 101 to 150 │ waits for 100, tells ...
        GPU       does 1 to 50     │ does 51 to 100     │ does 101 to 150     │ ...

    The GPU has something to do meanwhile, and the CPU is never more than two such stretches ahead: reading
    the newest sum would mean to wait.
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


def refuse_sum(replica: Replica, rank: int, seen: RunningSum | None, epoch: int) -> None:
    """Refuse what a GPU has summed up, if it was looked at, as `refuse_loss` does."""
    if seen is not None and not math.isfinite(seen.total):
        steps = f"steps {seen.first} to {seen.last}" if seen.first < seen.last else f"step {seen.last}"
        refuse_loss(replica, rank, seen.total, epoch, steps)


def refuse_loss(replica: Replica, rank: int, loss: float, epoch: int, steps: str) -> NoReturn:
    """Raise NotFinite for a loss that is not finite.

    Args:
        replica: what has computed it.
        rank: on which.
        loss: as it is.
        epoch: from 0.
        steps: in which, in words.
    """
    name = replica.first_not_finite()
    where = f"the first parameter that is not finite, in gradient or weight, is '{name}'"
    if replica.first_not_finite(gradients=False) is not None:
        where += (
            ". An update before has broken the weights, by the gradient of any rank: --skip-nonfinite 10 "
            "names the rank, and skips the update"
        )
    raise NotFinite(
        f"the loss became {loss} in {steps} (epoch {epoch + 1}) on rank {rank}; "
        f"{where if name else 'all weights and gradients are finite'}. {REMEDY}"
    )


def refuse_broken_weights(replica: Replica, rank: int, step: int) -> None:
    """Raise NotFinite if the last update has broken weights, which no loss may have shown."""
    name = replica.first_not_finite()
    if name is not None:
        raise NotFinite(
            f"parameter '{name}' is no longer finite after step {step} on rank {rank}, though the loss was. "
            f"{REMEDY}"
        )
