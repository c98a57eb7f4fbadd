"""The sum of the gradients of ranks that make an update together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.replica import NONE_MISSING, Missing, Replica


def add_up(total: Tensor, others: Iterable[Tensor]) -> None:
    """Add the other workers' gradients to `total`, in their order, and zero them.

        g = g_0 + g_1 + g_2 + ...

    With g_i = (n_i / n) * mean gradient of worker i's n_i samples, the sum is the mean over all n samples.

    Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.
    """
    for other in others:
        total.add_(other)
        other.zero_()


class JointlyMissing:
    """The parameters without a gradient on any rank (collective).

        rank 0   backward │ words, if they have changed │ barrier │ all rows, if its own has a gap │ barrier
        rank 1   backward │ words, if they have changed │ barrier │ all rows, if its own has a gap │ barrier

    The step makes the barriers. Where every parameter gets a gradient, a rank reads only its own
    counters.

    Across hosts, the owners of a slice ask each other when a parameter's sum there is zero: they all have the
    same sums, so either all ask or none does.
    """

    def __init__(
        self, replica: Replica, comm: Communicator, totals: Sequence[Tensor], slices: Sequence[slice]
    ) -> None:
        self._here = replica.gradients
        self._number_of = {parameter: number for number, parameter in enumerate(self._here.parameters)}
        self._words = comm.node.shared(comm.node.size, len(self._number_of), dtype=torch.uint8)
        self._rank, self._noted = comm.node.rank, NONE_MISSING
        self._cross = comm.cross if comm.hosts > 1 else None
        self._totals: dict[int, Tensor] = {}
        self._firsts: list[tuple[Tensor, Tensor, list[int]]] = []
        for flat, total, own in zip(replica.flats, totals, slices, strict=True):
            starts: dict[int, int] = {}
            for parameter, span in zip(flat.parameters, flat.spans, strict=True):
                start, stop = max(span.start, own.start), min(span.stop, own.stop)
                if start < stop:
                    number = self._number_of[parameter]
                    self._totals[number], starts[number] = total[start:stop], start
            if starts:
                self._firsts.append((total, torch.tensor([*starts.values()]), [*starts]))

    def note(self) -> None:
        """Publish the parameters without a gradient on this rank; called before the barrier."""
        missing = self._here.missing()
        if missing != self._noted:
            row = self._words[self._rank].zero_()
            row[[self._number_of[parameter] for parameter in missing]] = 1
            self._noted = missing

    def find(self) -> Missing:
        """Return the parameters without a gradient on any rank; called after the sum, before a barrier."""
        if self._cross is not None:
            return self._find_across(self._cross)
        if not self._noted:
            return NONE_MISSING
        missing = self._words.all(dim=0).nonzero().flatten().tolist()
        # Compression adds to a total what it has left of earlier ones.
        return self._of(number for number in missing if self._is_zero(number))

    def _find_across(self, cross: Communicator) -> Missing:
        zero = [
            number
            for total, starts, numbers in self._firsts
            for number, first in zip(numbers, (total[starts] == 0).tolist(), strict=True)
            if first and self._is_zero(number)
        ]
        if not zero:
            return NONE_MISSING
        brought = torch.logical_not(self._words.all(dim=0)).double()
        cross.all_reduce(brought)
        return self._of(number for number in zero if brought[number] == 0)

    def _of(self, numbers: Iterable[int]) -> Missing:
        return frozenset(self._here.parameters[number] for number in numbers)

    def _is_zero(self, number: int) -> bool:
        return number in self._totals and not bool(self._totals[number].any())
