"""Parameters that are not trained, and move nevertheless, such as a teacher's, which follow others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tutti.checksum import checksum
from tutti.comm.base import Communicator
from tutti.replica import Replica
from tutti.training.evaluation import average


class Untrained:
    """The parameters that a rank has for itself, as they are in none of its replica's vectors.

    A forward pass may change them. Most never change, such as those of a frozen body, and are not copied.

    Args:
        replica: the model, before it is trained.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._first = {name: checksum(parameter.cpu()) for name, parameter in self._all()}

    def moved(self) -> dict[str, Tensor]:
        """Return those that have changed since this was made, by name; they change with the next step."""
        return {
            name: parameter
            for name, parameter in self._all()
            if checksum(parameter.cpu()) != self._first.get(name)
        }

    @torch.no_grad()
    def meet(self, comm: Communicator) -> None:
        """Set those that have moved on any rank to the mean of the ranks' own, as buffers (collective).

        Args:
            comm: the ranks with replicas of the same model.
        """
        if comm.size == 1 or not self._first:
            return
        moved = self.moved()
        anywhere = torch.tensor([float(name in moved) for name in self._first])
        comm.all_reduce(anywhere)
        there = dict(self._all())
        names = [name for name, count in zip(self._first, anywhere.tolist(), strict=True) if count]
        average([there[name] for name in names if name in there], comm)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite those of these names."""
        for name, parameter in self._all():
            if name in values:
                parameter.copy_(values[name])

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        laid_out = self._replica.names
        for name, parameter in self._replica.module.named_parameters():
            plain = type(parameter.data) is Tensor and parameter.layout is torch.strided
            if plain and parameter not in laid_out:
                yield name, parameter.detach()
