"""Changes that a loop of the user's makes to its weights between two steps, such as a decay of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.replica import Replica, copy_all


class Edits:
    """The moves of the weights that were not made by the worker.

    It is for workers whose weights are a reading of others that count. Nobody but a loop of the user's does
    so: elsewhere it sees nothing, and costs nothing.
    """

    def __init__(self, replica: Replica) -> None:
        self._weights = [flat.weights for flat in replica.flats] if replica.in_own_loop else []
        self._left = [weights.clone() for weights in self._weights]

    @torch.no_grad()
    def take(self) -> list[Tensor]:
        """Return the moves since the last `note`, one for each of the replica's vectors; empty if none."""
        pairs = list(zip(self._weights, self._left, strict=True))
        if all(torch.equal(weights, left) for weights, left in pairs):
            return []
        moves = [weights - left for weights, left in pairs]
        self.note()
        return moves

    @torch.no_grad()
    def note(self) -> None:
        """Note the weights as the worker leaves them."""
        copy_all(self._left, self._weights)
