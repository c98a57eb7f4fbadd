"""Sums of one vector over some ranks, step after step, in different ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.replica import Flat
from tutti.state import Values


@dataclass(frozen=True)
class Layer:
    """The place of a parameter (or of a part) in a vector, and its shape; for a part, its length."""

    place: slice
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GradientLayout:
    """The layers in a vector of gradients, in order; gaps between them are always zero."""

    length: int
    dtype: torch.dtype
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, flat: Flat, own: slice) -> GradientLayout:
        """Return the layout of the stretch `own` of a flat vector."""
        layers = []
        for parameter, span in zip(flat.parameters, flat.spans, strict=True):
            start, stop = max(span.start, own.start), min(span.stop, own.stop)
            if start < stop:
                whole = stop - start == span.stop - span.start
                shape = tuple(parameter.shape) if whole else (stop - start,)
                layers.append(Layer(slice(start - own.start, stop - own.start), shape))
        return cls(own.stop - own.start, flat.grads.dtype, tuple(layers))

    @property
    def wide(self) -> torch.dtype:
        """The dtype to add such numbers up in: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


class GradientReduction(ABC):
    """A way to sum one vector over some ranks at every step. Its memory belongs to that vector."""

    @abstractmethod
    def all_reduce(self, vector: Tensor, share: float) -> int:
        """Overwrite `vector` with its sum over the ranks, bit-equal on all of them; return the bytes sent.

        `vector` is this rank's mean gradient times `share`, its share of the update's samples (collective).
        """

    def state(self) -> Values:
        """Return this rank's memory of earlier vectors, live."""
        return {}

    def load_state(self, values: Values) -> None:
        """Continue from the memory of a reduction with the same layout."""
        return


MakeReduction = Callable[[Communicator, GradientLayout], GradientReduction]
"""Makes a reduction, for vectors of a layout, over the ranks of a communicator."""
