"""Remedies for gradients that were computed from older weights than the centre's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor
from typing_extensions import override

from tutti.parameter_server.base import Allocate, Push, Slot, Vectors
from tutti.replica import Flat
from tutti.state import LocalState, Named, fill, pieces_of

EPSILON: Final = 1e-7
"""Keeps the root of the adaptive compensation above zero."""

SQUARES: Final = "mean_squares"
"""The first word of the names of its running means, in a checkpoint."""


class Remedy:
    """A correction of stale messages: of the vectors in place, or of the rate at which they are used.

    Attributes:
        compares: whether it needs the weights at which the message was computed (`Push.then`).
        scales: whether it changes the rate.
    """

    compares: bool = False
    scales: bool = False

    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        """Prepare for `slots` of the vectors `centre` (collective)."""
        return

    def rate(self, push: Push) -> float:
        """Return the factor of the learning rate for `push.message`."""
        return 1.0

    def apply(self, push: Push) -> None:
        """Change `push.message`."""
        return

    def state(self, slot: int, flats: Sequence[Flat]) -> LocalState:
        """Return what is remembered for a slot of vectors that are laid out like `flats`."""
        return LocalState()

    def load_state(self, held: Named, flats: Sequence[Flat]) -> None:
        """Go on from that, in all slots."""
        return


class Damping(Remedy):
    """A rate divided by the staleness; a gradient that is not stale keeps it.

    Zhang, Gupta, Lian, Liu 2016, "Staleness-aware Async-SGD for Distributed Deep Learning",
    arXiv:1511.05950, section 3.2: alpha = alpha_0 / tau where tau > 0.
    """

    scales = True

    @override
    def rate(self, push: Push) -> float:
        return 1.0 / max(1, push.staleness)


class Compensation(Remedy):
    """Delay compensation: gradients corrected by the loss's curvature along the way of the weights.

        g = g + lambda * g * g * (w_now - w_then)             (all products elementwise)

    With a decay the strength is smaller where gradients are large:

        s = m s + (1 - m) g * g                               zero at first
        g = g + lambda / sqrt(s + epsilon) * g * g * (w_now - w_then)

    Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv:1609.08326,
    equation 10 and algorithm 2 (DC-ASGD-c): g * g stands for the diagonal of the Hessian; section 5
    (DC-ASGD-a).

    Args:
        strength: lambda.
        decay: m; None: the strength is the same everywhere.
    """

    compares = True

    def __init__(self, strength: float, decay: float | None = None) -> None:
        self._strength, self._decay = strength, decay
        self._means: Vectors = ()
        self._slots: dict[int, Slot] = {}
        self._views: dict[int, tuple[Tensor, ...]] = {}

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        if self._decay is not None:
            self._means = [allocate(len(vector), vector.dtype) for vector in centre]
            self._slots = {slot.number: slot for slot in slots}
            self._views = {slot.number: slot.views(self._means) for slot in slots}

    @override
    def apply(self, push: Push) -> None:
        assert push.then is not None
        squares = [gradient * gradient for gradient in push.message]
        for mean_square, square in zip(self._views.get(push.slot, ()), squares, strict=False):
            assert self._decay is not None
            mean_square.lerp_(square, 1 - self._decay)
            square.div_((mean_square + EPSILON).sqrt_())
        for gradient, square, now, then in zip(push.message, squares, push.centre, push.then, strict=True):
            gradient.addcmul_(square, now - then, value=self._strength)

    @override
    def state(self, slot: int, flats: Sequence[Flat]) -> LocalState:
        places = self._slots[slot].places if self._means else ()
        parts = zip(flats, self._means, places, strict=False)
        return LocalState(
            [piece for flat, mean, place in parts for piece in pieces_of(SQUARES, flat, mean, place)]
        )

    @override
    def load_state(self, held: Named, flats: Sequence[Flat]) -> None:
        if any(name.startswith(f"{SQUARES}/") for name in held.tensors):
            for slot in self._slots.values():
                for flat, mean, place in zip(flats, self._means, slot.places, strict=True):
                    fill(held.tensors, SQUARES, flat, mean, place)
