"""A rule that adds up the workers' gradients, and moves the centre when enough of them have come."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.centre.base import Allocate, Desk, Outcome, Rule, Slot, Vectors
from tutti.centre.optimizing import OptimizerRule
from tutti.errors import BadOption
from tutti.optim.clipping import clip
from tutti.replica import Flat, Replica


class Rounds(Rule):
    """c = optimizer(c, clip(workers / n * sum of the first n gradients)), n a share of the workers: a round.

    A gradient that comes after its round has closed is dropped. The workers whose gradients were used are
    answered when the round closes. Workers that have left are not waited for.

    Args:
        optimizer: the user's; see `OptimizerRule`.
        replica: the model that its parameters belong to.
        workers: how many workers there are; each brings its share of the gradient of the whole batch.
        quorum: the share of the workers whose gradients close a round.
        norm: the largest 2-norm of the whole gradient; there is one slot alone then. None: any.
        value: the largest absolute value of an element, limited before the norm. None: any.
    """

    holds = True
    consumes = True
    optimizes = True

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        workers: int,
        quorum: float = 1.0,
        norm: float | None = None,
        value: float | None = None,
    ) -> None:
        self._inner = OptimizerRule(optimizer, replica)
        self._workers, self._quorum, self._norm, self._value = workers, quorum, norm, value
        self._came: dict[int, Tensor] = {}
        self._gone: dict[int, Tensor] = {}

    @override
    def cut(self, flat: Flat, parts: int) -> list[slice]:
        return self._inner.cut(flat, parts)

    @override
    def most_slots(self) -> int | None:
        return 1 if self._norm is not None else None

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        self._inner.open(centre, slots, allocate)
        came, gone = allocate(len(slots), torch.int64), allocate(len(slots), torch.int64)
        self._came = {slot.number: came[at] for at, slot in enumerate(slots)}
        self._gone = {slot.number: gone[at] for at, slot in enumerate(slots)}

    @override
    def apply(self, desk: Desk) -> Outcome:
        if desk.staleness:
            return Outcome.DROPPED
        for total, message in zip(self._inner.inbox(desk.slot), desk.message, strict=True):
            total.add_(message)
        self._came[desk.slot] += 1
        if not self._is_complete(desk.slot):
            return Outcome.HELD
        self.close(desk)
        return Outcome.APPLIED

    def _is_complete(self, slot: int) -> bool:
        active = self._workers - int(self._gone[slot])
        # A quorum of 0.7 of 10 workers is 7 of them, whatever 0.7 * 10 is in binary.
        needed = max(1, math.ceil(self._quorum * active - 1e-9))
        return int(self._came[slot]) >= needed

    @override
    def close(self, desk: Desk) -> None:
        totals = self._inner.inbox(desk.slot)
        came = int(self._came[desk.slot])
        if came != self._workers:
            for total in totals:
                total.mul_(self._workers / came)
        clip(totals, self._norm, self._value)
        self._inner.apply(Desk(desk.slot, desk.centre, totals, None))
        for total in totals:
            total.zero_()
        self._came[desk.slot].zero_()

    @override
    def leave(self, slot: int) -> bool:
        self._gone[slot] += 1
        return bool(self._came[slot]) and self._is_complete(slot)

    @override
    def join(self, slot: int) -> None:
        self._gone[slot] -= 1

    @override
    def settings(self) -> list[float]:
        return self._inner.settings()

    @override
    def use(self, settings: list[float]) -> None:
        self._inner.use(settings)

    @override
    def above(self, hosts: int) -> Rule:
        raise BadOption(
            "a synchronous parameter server has one level, as a round of it closes everywhere at once; use "
            "'--levels 1'"
        )
