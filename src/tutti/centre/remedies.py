"""What a centre does to a stale gradient before it applies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from tutti.centre.base import Allocate, Desk, Slot, Vectors
from tutti.rules.staleness import compensate, compensate_adaptively, damping


class Remedy:
    """Changes a stale message in place, or the rate at which it is used.

    Attributes:
        compares: whether it needs the weights at which the message was computed (`Desk.then`).
        scales: whether it changes the rate.
    """

    compares: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        """Prepare for `slots` of the vectors `centre` (collective)."""
        return

    def rate(self, desk: Desk) -> float:
        """What to multiply the learning rate by for `desk.message`."""
        return 1.0

    def apply(self, desk: Desk) -> None:
        """Change `desk.message`."""
        return


class Damping(Remedy):
    """The rate for a message that is tau updates late is 1/tau of it: see `rules.staleness.damping`."""

    scales: ClassVar[bool] = True

    @override
    def rate(self, desk: Desk) -> float:
        return damping(desk.staleness)


class Compensation(Remedy):
    """Delay compensation with a constant strength: see `rules.staleness.compensate`."""

    compares: ClassVar[bool] = True

    def __init__(self, strength: float) -> None:
        self._strength = strength

    @override
    def apply(self, desk: Desk) -> None:
        assert desk.then is not None
        for message, now, then in zip(desk.message, desk.centre, desk.then, strict=True):
            compensate(message, now, then, self._strength)


class AdaptiveCompensation(Remedy):
    """Delay compensation that follows the gradients' size: see `rules.staleness.compensate_adaptively`."""

    compares: ClassVar[bool] = True

    def __init__(self, strength: float, decay: float) -> None:
        self._strength, self._decay = strength, decay
        self._squares: dict[int, tuple[Tensor, ...]] = {}

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        for slot in slots:
            views = slot.views(centre)
            self._squares[slot.number] = tuple(allocate(len(view), view.dtype) for view in views)

    @override
    def apply(self, desk: Desk) -> None:
        assert desk.then is not None
        parts = zip(desk.message, self._squares[desk.slot], desk.centre, desk.then, strict=True)
        for message, mean_square, now, then in parts:
            compensate_adaptively(message, mean_square, now, then, self._strength, self._decay)
