"""Batches handed out one by one, first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from typing_extensions import override

from tutti.comm.base import cut
from tutti.data.batches import Batch, Batches, Update


class Queue(Batches):
    """Deals the batches of an epoch to whichever rank asks next: a slow one never holds up the rest.

    The batches and their order are those of `batches`; who gets which is decided by an atomic counter. It
    counts on over the epochs: the ticket that tells a rank that an epoch is over is its first of the next.

        ticket       0   1   2   3   4   5   6 │ 7   8   9
        rank 0       ■───────■───────■─────────│─■── ...        epoch 1 begins with ticket 7
        rank 1 slow      ■───────────────■─────│─────■── ...

    Args:
        batches: whose batches to deal; made with `own=True`.
        draw: the next ticket of all ranks, such as `comm.counter().add`.
    """

    def __init__(self, batches: Batches, draw: Callable[[], int]) -> None:
        order = batches.passes, batches.seed, batches.shuffle
        super().__init__(batches.part, batches.batch_size, batches.rank, batches.size, *order, own=True)
        self._draw = draw
        self._count = -(-len(batches.part) // batches.batch_size)
        self._first: int | None = None
        self._held: int | None = None

    @property
    @override
    def fewest(self) -> int:
        """The smallest number of samples that a rank may find in one pass."""
        return (len(self.part) - (self._count - 1) * self.batch_size) // self.passes

    @override
    def prepare(self, epoch: int) -> None:
        """Do nothing: the samples of an epoch are looked up batch by batch."""

    @override
    def epoch(self, epoch: int, skip: int = 0, rounds: int | None = None) -> Iterator[Update]:
        """The batches of one epoch that this rank gets. Epochs are asked for in order, without gaps.

        Args:
            epoch: its number, from 0.
            skip: rounds to leave out at its beginning (they were done before); for the first epoch asked for.
            rounds: how many rounds the epoch is cut short to.

        Yields:
            One update for each batch that this rank gets. Its `samples` are those that all ranks were dealt
            since this rank's last.
        """
        size, start = self.size, epoch * self._count
        if self._first is None:
            self._first = start + min(self._count, skip * size)
        stop = start + (self._count if rounds is None else min(self._count, (skip + rounds) * size))
        order, known = self.order(epoch), max(start, self._first)
        while (ticket := self._next(self._first)) < stop:
            self._held = None
            number = ticket - start
            first, last = number * self.batch_size, min((number + 1) * self.batch_size, len(self.part))
            passes = self._passes(order[first:last])
            dealt = last - (known - start) * self.batch_size
            known = ticket + 1
            yield Update(dealt, passes, epoch * self.updates + number // size)

    def _next(self, first: int) -> int:
        """The rank's ticket, counted from the beginning of epoch 0; it stays its own until it is used."""
        if self._held is None:
            self._held = first + self._draw()
        return self._held

    def _passes(self, indices: Tensor) -> tuple[Batch, ...]:
        """One batch, cut into the passes of one rank."""
        take, count = self.part.take, len(indices)
        parts = [indices[part] for part in cut(count, self.passes)]
        return tuple(Batch(*take(part), len(part) / count) for part in parts)
