"""Parameters without a gradient in an update, which torch's optimizers leave as they are.

A replica's gradients are stored in a vector that always exists, zero where nothing was added. Each
parameter's view of it has a version counter of its own, which counts what autograd adds: so nobody has to
look at the numbers. In a loop of the user's, a parameter has no view of it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor, nn

from tutti.replica import Replica

Missing = frozenset[nn.Parameter]
"""Parameters that no gradient was computed for."""

NONE_MISSING: Final[Missing] = frozenset()


class MissingGradients:
    """The parameters of a replica that got no gradient since the last `take`.

    Args:
        replica: the model; its gradients are zero now.
        slices: of each of its vectors, what is looked at. None: all.

    Attributes:
        parameters: those looked at, in the order of the vectors.
    """

    def __init__(self, replica: Replica, slices: Sequence[slice] | None = None) -> None:
        if slices is None:
            slices = [slice(0, len(flat.weights)) for flat in replica.flats]
        found = [
            (parameter, flat.grads[span], flat.grads if parameter.grad is None else parameter.grad)
            for flat, own in zip(replica.flats, slices, strict=True)
            for parameter, span in zip(flat.parameters, flat.spans, strict=True)
            if max(span.start, own.start) < min(span.stop, own.stop)
        ]
        self.parameters: tuple[nn.Parameter, ...] = tuple(parameter for parameter, _, _ in found)
        self._in_own_loop = replica.in_own_loop
        self._places: list[Tensor] = [place for _, place, _ in found]
        self._views: list[Tensor] = [view for _, _, view in found]
        self._versions = self._count()

    def take(self) -> tuple[int, ...]:
        """Return the numbers of the parameters without a gradient; to be called once for each update."""
        if self._in_own_loop:
            return tuple(number for number, p in enumerate(self.parameters) if p.grad is None)
        before, self._versions = self._versions, self._count()
        if not any(map(int.__eq__, before, self._versions)):
            return ()
        # A gradient may also have been written into the vector itself.
        return tuple(
            number
            for number, (old, new) in enumerate(zip(before, self._versions, strict=True))
            if old == new and not bool(self._places[number].any())
        )

    def take_parameters(self) -> Missing:
        """Return the parameters without a gradient; instead of `take`."""
        return self.of(self.take())

    def of(self, numbers: Sequence[int]) -> Missing:
        """Return the parameters with these numbers."""
        return frozenset(self.parameters[number] for number in numbers)

    def _count(self) -> list[int]:
        return [view._version for view in self._views]
