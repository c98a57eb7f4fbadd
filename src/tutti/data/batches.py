"""The samples of each weight update, and each rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import cut
from tutti.data.columns import Inputs
from tutti.data.parts import Part, epoch_generator
from tutti.data.sampling import draw
from tutti.errors import BadOption
from tutti.state import Saved, State

LEAST: Final = 2
"""Samples that a split by speed leaves every rank, where an equal split would: BatchNorm needs two."""


@dataclass(frozen=True)
class Batch:
    """The samples that one rank runs forward and backward in one pass.

    Attributes:
        inputs: as the model sees them, of shape (samples, ...), maybe empty; several are by name or by
            position.
        targets: of shape (samples, ...).
        share: these samples / all samples of the update, or of the rank's own batch where each rank has one;
            0.0 for none. With `loss` the mean over this batch, `(loss * share).backward()` makes the sum over
            the passes (and the ranks that share an update) the gradient of the mean.
        samples: numbers that identify them in the epoch, of shape (samples,), int64: positions in the part,
            or, where an epoch draws with replacement, the places of the draws. None: they have none.
        weights: of the samples in losses and metrics, of shape (samples,), float64; None: each counts once.
    """

    inputs: Inputs
    targets: Tensor
    share: float
    samples: Tensor | None = None
    weights: Tensor | None = None


Round: TypeAlias = tuple[int, tuple[Batch, ...]]
"""An update, or a round of them where each rank makes its own: its number since the run began, from 0; and
what one rank computes for it, one pass after the other."""

Augment: TypeAlias = Callable[[int, Tensor, Inputs, Tensor], tuple[Inputs, Tensor]]
"""(epoch, `Batch.samples`, inputs, targets) -> inputs and targets as they are trained with."""

_Span = tuple[int, int, float]
"""The beginning and end of a rank's pass in a round, and its share."""


def check_split(batch_size: int, ranks: int) -> None:
    """Refuse a batch with fewer samples than ranks that share it."""
    if batch_size < ranks:
        over = f"{ranks} ranks" if ranks > 1 else "1 rank"
        samples = f"{batch_size} sample{'' if batch_size == 1 else 's'}"
        raise BadOption(
            f"a batch of {samples} cannot be split over {over}; use '--batch-size {ranks}' or more, "
            f"or fewer workers"
        )


class Batches:
    """Cuts a part into updates, each update into passes, and each pass over the ranks.

    An epoch's samples and their order depend only on (seed, epoch), whatever the number of ranks. Where
    samples are drawn with replacement, each draw counts as another sample:

        order of epoch e    │ update 0          │ update 1          │ 2      │
        one update          │ pass 0  │ pass 1  │
        one pass            │r0 │r1 │r2│

    The order is a random one of all samples, or by windows in a streamed part (`WindowOrder`).

    With `own`, each worker has whole batches: a round takes one for each worker, the last round the rest, in
    equal parts. A worker is one rank, or a team that shares its batches.

        order of epoch e    │ round 0                     │ round 1                     │ 2   │
        one round           │ batch of r0 │ of r1 │ of r2 │
        one batch           │ pass 0│pass 1│

    Args:
        part: the source of the samples.
        batch_size: samples behind one weight update: over all ranks and passes, or with `own` of one worker,
            over all its passes. The last update of an epoch has the rest.
        rank: this rank; with `own` the number of the worker.
        size: the number of ranks; with `own` of workers.
        passes: forward and backward passes of each rank for one update.
        seed: decides the order, together with the epoch.
        own: each worker has its own batches.
        chances: weights of the samples, by which an epoch draws with replacement; None: it takes each once.
        team: with `own`, this rank's number in its worker, and the worker's number of ranks.

    Attributes:
        updates: the number of updates in one epoch; with `own`, of rounds.
        take: returns the inputs and targets at some positions of the part, of shape (samples,).
        augment: changes them, with the number of the epoch and their `Batch.samples`; None: they stay.

    Raises:
        BadOption: the batch has fewer samples than there are ranks that share it, or is empty.
    """

    def __init__(
        self,
        part: Part,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        passes: int = 1,
        seed: int = 0,
        own: bool = False,
        chances: Tensor | None = None,
        team: tuple[int, int] = (0, 1),
    ) -> None:
        check_split(batch_size, team[1] if own else size)
        self.part, self.batch_size, self.seed = part, batch_size, seed
        self.augment: Augment | None = None
        self.take: Callable[[Tensor], tuple[Inputs, Tensor]] = part.take
        self.chances = chances
        self._cumulated = None if chances is None else chances.cumsum(0)
        self._orders: dict[int, Tensor] = {}
        self._cut_short: dict[int, Tensor] = {}
        self.rank, self.size, self.passes, self.own = rank, size, passes, own
        self.round_size = batch_size * size if own else batch_size
        self.updates = self.rounds(len(part))
        self._member, self._members = team
        self._speeds: Sequence[float] = ()
        self._last_size = self._last_of(len(part))
        self._full = self._spans(self.round_size)

    @property
    def fewest(self) -> int:
        """The smallest number of samples that a rank may find in one pass."""
        return self._last_size // self.size // self.passes // self._members

    @property
    def fewest_together(self) -> int:
        """The smallest number of samples in one pass of all ranks that share it."""
        return self._last_size // (self.size if self.own else 1) // self.passes

    def rounds(self, samples: int) -> int:
        """Return the number of rounds needed for some samples."""
        return -(-samples // self.round_size)

    def _last_of(self, samples: int) -> int:
        return samples - (self.rounds(samples) - 1) * self.round_size

    def split_by(self, speeds: Sequence[float]) -> None:
        """From the next update on, cut each pass over the ranks by their speeds, the same on all ranks.

        Every rank keeps a few samples, and an update's gradient stays the mean over its samples.

        Args:
            speeds: of each rank, above 0; only their ratios count.
        """
        self._speeds = speeds
        self._full = self._spans(self.round_size)

    def state(self, epoch: int, rounds: Sequence[int]) -> State:
        """Return the position in the middle of an epoch, while no rank is in a round.

        Args:
            epoch: its number, from 0.
            rounds: each rank's next round of the epoch.
        """
        return State(shared={"rounds": list(rounds), "left": self._left(epoch, rounds)})

    def load_state(self, epoch: int, saved: Saved) -> int:
        """Continue in the middle of an epoch: each remaining sample is taken once, in their order.

        Args:
            epoch: the epoch's number, from 0.
            saved: the position.

        Returns:
            The first round of the epoch to make. The epoch ends with the same round as any other.
        """
        left = saved.shared["left"]
        if not isinstance(left, Tensor):
            left = self.order(epoch)[len(self.part) - left :]
        self._cut_short = {epoch: left}
        return self.updates - self.rounds(len(left))

    def _left(self, epoch: int, rounds: Sequence[int]) -> Tensor | int:
        """Return the remaining samples of an epoch, or their number if they end its order."""
        cut_short = self._cut_short.get(epoch)
        samples = len(self.part) if cut_short is None else len(cut_short)
        skipped = self.updates - self.rounds(samples)
        made = [number - skipped for number in rounds]
        if len({*made}) == 1:
            start = made[0] * self.round_size
            return max(0, samples - start) if cut_short is None else cut_short[start:]
        left = torch.ones(samples, dtype=torch.bool)
        for rank, count in enumerate(made):
            for start in range(0, min(count * self.round_size, samples), self.round_size):
                mine = cut(min(self.round_size, samples - start), self.size)[rank]
                left[start + mine.start : start + mine.stop] = False
        return self.order(epoch)[left]

    def order(self, epoch: int) -> Tensor:
        """Return the order in which an epoch takes the samples: positions in the part, int64.

        Where it draws with replacement, these are the places of its draws; `drawn` gives their samples.
        """
        if epoch in self._cut_short:
            return self._cut_short[epoch]
        if self._cumulated is not None:
            return torch.arange(len(self.part))
        return self.part.order(self.seed, epoch)

    def drawn(self, epoch: int) -> Tensor | None:
        """Return the sample of each draw of an epoch: positions in the part; None: it takes each once."""
        return None if self._cumulated is None else draw(self._cumulated, epoch_generator(self.seed, epoch))

    def prepare(self, epoch: int) -> None:
        """Move an epoch's order to the samples' memory, while a GPU still computes the previous epoch."""
        if epoch in self._orders:
            return
        order = self.order(epoch)
        if self.part.device.type == "cuda":
            # A copy from pinned memory is queued on the GPU, and no thread waits for it.
            order = order.pin_memory().to(self.part.device, non_blocking=True)
        self._orders = {epoch: order}

    def samples(self, rounds: int) -> int:
        """Return the number of samples in the first rounds of an epoch, over all ranks and passes."""
        return min(rounds * self.round_size, len(self.part))

    def epoch(self, epoch: int, first: int = 0, stop: int | None = None) -> Iterator[Round]:
        """Yield the rounds of one epoch, with this rank's passes of each.

        Args:
            epoch: its number, from 0.
            first: the first round.
            stop: the round before which to end; None: at the end of the epoch.
        """
        self.prepare(epoch)
        order, make = self._orders.pop(epoch), self._making(epoch)
        skipped = self.updates - self.rounds(len(order))
        for update in range(first, self.updates if stop is None else min(self.updates, stop)):
            start = (update - skipped) * self.round_size
            self.part.expect(order, start)
            spans = self._full if update < self.updates - 1 else self._spans(len(order) - start)
            mine = ((order[start + a : start + b], share) for a, b, share in spans)
            batches = tuple(make(samples, share) for samples, share in mine)
            yield epoch * self.updates + update, batches

    def _making(self, epoch: int) -> Callable[[Tensor, float], Batch]:
        """Return the function that makes an epoch's batches from a stretch of `order` and a share."""
        augment, drawn = self.augment, self.drawn(epoch)
        drawn = None if drawn is None else drawn.to(self.part.device)

        def make(samples: Tensor, share: float) -> Batch:
            stored = samples if drawn is None else drawn[samples]
            taken = self.take(stored) if augment is None else augment(epoch, samples, *self.take(stored))
            return Batch(*taken, share, samples, self.part.weights_of(stored))

        return make

    def _spans(self, samples: int) -> list[_Span]:
        """Return this rank's samples of a round, for each pass; no pass if its worker has none."""
        mine = cut(samples, self.size)[self.rank] if self.own else slice(0, samples)
        whole, found = _length(mine), []
        for one in cut(whole, self.passes) if whole else ():
            shares = cut(_length(one), self._members) if self.own else self._cut(_length(one))
            part = shares[self._member if self.own else self.rank]
            start = mine.start + one.start
            found.append((start + part.start, start + part.stop, _length(part) / whole))
        return found

    def _cut(self, samples: int) -> list[slice]:
        """Cut one pass over the ranks."""
        if not self._speeds:
            return cut(samples, self.size)
        edges = [0, *accumulate(by_speed(samples, self._speeds, LEAST))]
        return [slice(start, stop) for start, stop in pairwise(edges)]


class Queue(Batches):
    """Deals the batches of an epoch to the next rank that asks: a slow one never holds up the rest.

    The batches and their order are those of `batches`; an atomic counter decides who gets which. It counts on
    over the epochs: the ticket by which a rank learns that an epoch is over is its first of the next.

        ticket       0   1   2   3   4   5   6 │ 7   8   9
        rank 0       ■───────■───────■─────────│─■── ...        epoch 1 begins with ticket 7
        rank 1 slow      ■───────────────■─────│─────■── ...

    Args:
        batches: the batches to deal; made with `own=True`.
        draw: takes some tickets of all ranks, and returns the first; such as `comm.counter().add`.
    """

    def __init__(self, batches: Batches, draw: Callable[[int], int]) -> None:
        passes, seed = batches.passes, batches.seed
        super().__init__(
            *(batches.part, batches.batch_size, batches.rank, batches.size, passes, seed),
            own=True,
            chances=batches.chances,
        )
        self._draw = draw
        self._count = -(-len(batches.part) // batches.batch_size)
        self._ticket: int | None = None
        self._end = 0

    @property
    @override
    def fewest(self) -> int:
        """The smallest number of samples that a rank may find in one pass."""
        return (len(self.part) - (self._count - 1) * self.batch_size) // self.passes

    @override
    def prepare(self, epoch: int) -> None:
        """Do nothing: the samples of an epoch are looked up batch by batch."""

    @override
    def load_state(self, epoch: int, saved: Saved) -> int:
        super().load_state(epoch, saved)
        skipped = self._skipped(epoch)
        if self.rank == 0:
            self._draw(epoch * self._count + skipped)
        return skipped // self.size

    @override
    def _left(self, epoch: int, rounds: Sequence[int]) -> Tensor | int:
        # Of an epoch that is still to begin, nothing is dealt: there are only tickets for it.
        dealt = min(self._draw(0), self._end) - epoch * self._count - self._skipped(epoch)
        cut_short = self._cut_short.get(epoch)
        start = dealt * self.batch_size
        return max(0, len(self.part) - start) if cut_short is None else cut_short[start:]

    def _skipped(self, epoch: int) -> int:
        """Return the number of batches that a cut-short epoch lacks at its beginning."""
        return self._count - -(-len(self.order(epoch)) // self.batch_size)

    @override
    def epoch(self, epoch: int, first: int = 0, stop: int | None = None) -> Iterator[Round]:
        """Yield this rank's batches of one epoch. Call this for the epochs in order, without gaps.

        Args:
            epoch: its number, from 0.
            first: unused: the tickets know where the epoch continues.
            stop: the number of rounds to which the epoch is cut short.
        """
        start, order, skipped = epoch * self._count, self.order(epoch), self._skipped(epoch)
        self._end = start + (self._count if stop is None else min(self._count, stop * self.size))
        make = self._making(epoch)
        ticket, self._ticket = self._draw(1) if self._ticket is None else self._ticket, None
        while ticket < self._end:
            number = ticket - start
            at = (number - skipped) * self.batch_size
            self.part.expect(order, at)
            passes = self._passes(order[at : at + self.batch_size], make)
            yield epoch * self.updates + number // self.size, passes
            ticket = self._draw(1)
        self._ticket = ticket  # It is for a later epoch.

    def _passes(self, indices: Tensor, make: Callable[[Tensor, float], Batch]) -> tuple[Batch, ...]:
        """Cut one batch into the passes of one rank."""
        count = len(indices)
        parts = [indices[part] for part in cut(count, self.passes)]
        return tuple(make(part, len(part) / count) for part in parts)


def by_speed(samples: int, speeds: Sequence[float], least: int = 0) -> list[int]:
    """Divide samples over ranks in the ratios of their speeds, rounded; each gets `least`, if possible."""
    least = min(least, samples // len(speeds))
    free, left = list(range(len(speeds))), samples
    while slow := [rank for rank in free if left * speeds[rank] < least * sum(speeds[r] for r in free)]:
        free, left = [rank for rank in free if rank not in slow], left - least * len(slow)
    total = sum(speeds[rank] for rank in free)
    ideal = {rank: left * speeds[rank] / total for rank in free}
    parts = [int(ideal[rank]) if rank in ideal else least for rank in range(len(speeds))]
    nearest = sorted(free, key=lambda rank: (parts[rank] - ideal[rank], rank))
    for rank in nearest[: samples - sum(parts)]:
        parts[rank] += 1
    return parts


def _length(part: slice) -> int:
    return int(part.stop - part.start)
