"""A rule that adds up the workers' gradients, and moves the centre when enough of them have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.centre.base import Allocate, Desk, Outcome, Rule, Slot, Vectors
from tutti.centre.optimizing import OptimizerRule
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip
from tutti.optim.missing import Missing
from tutti.replica import Flat, Replica

ROUNDING: Final = 1e-9
"""How far a sum of shares may be from what it stands for: 0.7 is 7 tenths, whatever they are in binary."""

EPSILON: Final = 1e-14
"""How far a sum of weights may be from 1 for having been rounded."""


class Rounds(Rule):
    """c = optimizer(c, clip(sum of the gradients / sum of their weights)) of those that have come: a round.

    A gradient belongs to the round whose number it has. The round closes when those that have come stand for
    the quorum of the update's samples, or when all workers' have; then their workers are answered. A gradient
    that comes later is dropped. Parameters for which none of a round has a gradient are left as they are.

    Args:
        optimizer: the user's; see `OptimizerRule`.
        replica: the model that its parameters belong to.
        workers: how many workers there are.
        quorum: the share of an update's samples whose gradients close a round; 1: all workers, also those
            without samples.
        norm: the largest 2-norm of the whole gradient; there is one slot alone then. None: any.
        value: the largest absolute value of an element, limited before the norm. None: any.
        comm: the workers, for the optimizer; see `OptimizerRule`.

    Attributes:
        share: which part of the update's samples the next message is the gradient of.
        weight: by which that gradient was weighted: the share, or the part of the loss's own denominator.
        round: which update it is meant for, from 0.
        edits: what the workers' loops have changed in their weights since the round before; all have changed
            the same, and one brings it. It is used up.
        spoiled: whether it is of no use, so that its round makes no step.
    """

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
        comm: Communicator | None = None,
    ) -> None:
        self._inner = OptimizerRule(optimizer, replica, comm=comm)
        self._workers, self._quorum, self._norm, self._value = workers, quorum, norm, value
        self.share = self.weight = 1 / workers
        self.round = 0
        self.spoiled = False
        self.edits: Vectors = ()
        self._edits: Vectors = ()
        self._in_own_loop = replica.in_own_loop
        self._came: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._closed: dict[int, Tensor] = {}
        self._spoiled: dict[int, Tensor] = {}
        self._brought: dict[int, Tensor] = {}

    @property
    def waits(self) -> bool:
        """Whether no round closes before all workers have come."""
        return self._quorum >= 1

    @property
    def missing(self) -> Missing:
        """The parameters for which the next message has no gradient."""
        return self._inner.missing

    @missing.setter
    def missing(self, missing: Missing) -> None:
        self._inner.missing = missing

    @override
    def cut(self, flat: Flat, parts: int) -> list[slice]:
        return self._inner.cut(flat, parts)

    @override
    def most_slots(self) -> int | None:
        return 1 if self._norm is not None else self._inner.most_slots()

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        self._inner.open(centre, slots, allocate)
        numbers = [slot.number for slot in slots]
        self._came = dict(zip(numbers, allocate(len(slots), torch.int64), strict=True))
        self._shares = dict(zip(numbers, allocate(len(slots), torch.float64), strict=True))
        self._weights = dict(zip(numbers, allocate(len(slots), torch.float64), strict=True))
        self._closed = dict(zip(numbers, allocate(len(slots), torch.int64), strict=True))
        if self._in_own_loop:
            self._edits = [allocate(len(vector), vector.dtype) for vector in centre]
        self._spoiled = dict(zip(numbers, allocate(len(slots), torch.uint8), strict=True))
        brought = allocate(len(slots) * len(self._inner.parameters), torch.uint8).view(len(slots), -1)
        self._brought = dict(zip(numbers, brought, strict=True))

    @override
    def apply(self, desk: Desk) -> Outcome:
        for total, edit in zip(self._edits, self.edits, strict=False):
            total.add_(edit)
        self.edits = ()
        if int(self._closed[desk.slot]) != self.round:
            return Outcome.DROPPED
        for total, message in zip(self._inner.inbox(desk.slot), desk.message, strict=True):
            total.add_(message)
        self._brought[desk.slot] |= self._present()
        self._came[desk.slot] += 1
        self._spoiled[desk.slot] |= self.spoiled
        self._shares[desk.slot] += self.share
        self._weights[desk.slot] += self.weight
        if not self._is_complete(desk.slot):
            return Outcome.HELD
        self._close(desk)
        return Outcome.APPLIED

    def _present(self) -> Tensor:
        """For each parameter whether the message has a gradient, as 0 or 1."""
        present = torch.ones(len(self._inner.parameters), dtype=torch.uint8)
        if self.missing:
            present[[n for n, p in enumerate(self._inner.parameters) if p in self.missing]] = 0
        return present

    def _is_complete(self, slot: int) -> bool:
        if int(self._came[slot]) == self._workers:
            return True
        return self._quorum < 1 and float(self._shares[slot]) >= self._quorum - ROUNDING

    def _close(self, desk: Desk) -> None:
        # Not before: others may be waiting to read what the round before has led to.
        for centre, edit in zip(desk.centre, self._edits, strict=False):
            centre.add_(edit)
            edit.zero_()
        totals, weight = self._inner.inbox(desk.slot), float(self._weights[desk.slot])
        # Without any sample there is nothing to learn, and no mean.
        if weight > 0 and not self._spoiled[desk.slot]:
            if abs(weight - 1) > EPSILON:
                for total in totals:
                    total.div_(weight)
            clip(totals, self._norm, self._value)
            brought = zip(self._inner.parameters, self._brought[desk.slot].tolist(), strict=True)
            self.missing = frozenset(parameter for parameter, has in brought if not has)
            self._inner.apply(Desk(desk.slot, desk.centre, totals, None))
        for total in totals:
            total.zero_()
        self._brought[desk.slot].zero_()
        self._came[desk.slot].zero_()
        self._spoiled[desk.slot].zero_()
        self._shares[desk.slot].zero_()
        self._weights[desk.slot].zero_()
        self._closed[desk.slot] += 1

    @override
    def answer(self, desk: Desk) -> None:
        self._inner.answer(desk)

    def adopt(self) -> None:
        """Go on from the state that the user's optimizer has been given in its loop (collective)."""
        self._inner.adopt()

    @override
    def settings(self) -> list[float]:
        return [self.share, self.weight, self.round, self.spoiled, *self._inner.settings()]

    @override
    def use(self, settings: list[float]) -> None:
        self.share, self.weight, self.round = settings[0], settings[1], int(settings[2])
        self.spoiled = bool(settings[3])
        self._inner.use(settings[4:])

    @override
    def above(self, hosts: int) -> Rule:
        raise BadOption(
            "a synchronous parameter server has one level, as a round of it closes everywhere at once; use "
            "'--levels 1'"
        )
