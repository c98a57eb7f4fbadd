"""A model of two dtypes, vectors of its lengths, and the numbers in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutti.replica import Replica


class TwoTypes(nn.Module):
    """Parameters of two dtypes, each a flat vector of its own."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.single = nn.Linear(7, 13)
        self.double = nn.Linear(13, 5).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def vectors(replica: Replica, value: float) -> list[Tensor]:
    """A value for every parameter's elements, and zeros in the gaps."""
    found = []
    for flat in replica.flats:
        vector = torch.zeros_like(flat.weights)
        for span in flat.spans:
            vector[span] = value
        found.append(vector)
    return found


def values(weights: list[Tensor]) -> set[float]:
    """The different numbers in some vectors, but for the gaps' zeros."""
    return {float(value) for vector in weights for value in vector.unique()} - {0.0}
