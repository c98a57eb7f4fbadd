"""Which samples stand behind each weight update, and which of them each rank takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tutti.data.parts import Part
from tutti.errors import BadOption


@dataclass(frozen=True)
class Batch:
    """What one rank runs forward and backward in one pass.

    Attributes:
        inputs: as the model sees them, of shape (samples, ...); no sample when there are fewer than ranks.
        targets: of shape (samples, ...).
        share: these samples / all samples of the update; 0.0 for none. With `loss` the mean over this batch,
            `(loss * share).backward()` makes the sum over all ranks and passes the gradient of the mean.
    """

    inputs: Tensor
    targets: Tensor
    share: float


@dataclass(frozen=True)
class Update:
    """One rank's part of one weight update.

    Attributes:
        samples: how many samples stand behind the update, over all ranks and passes.
        passes: what this rank computes, one after the other.
    """

    samples: int
    passes: tuple[Batch, ...]


class Batches:
    """Cuts a part into updates, each update into passes, and each pass over the ranks.

    The order of the samples depends on (seed, epoch) alone, so any number of ranks trains the same way:

        order of epoch e    │ update 0          │ update 1          │ 2      │
        one update          │ pass 0  │ pass 1  │
        one pass            │r0 │r1 │r2│

    Args:
        part: where the samples come from.
        batch_size: samples behind one weight update, over all ranks and passes; the last update of an epoch
            has what is left.
        rank: which rank's batches these are.
        size: how many ranks there are.
        passes: forward and backward passes of each rank for one update.
        seed: decides the order, together with the epoch.
        shuffle: False takes the samples in their stored order.

    Attributes:
        updates: how many updates one epoch has.

    Raises:
        BadOption: the batch has fewer samples than there are ranks, or is empty.
    """

    def __init__(
        self,
        part: Part,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        passes: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if batch_size < size:
            ranks = f"{size} ranks" if size > 1 else "1 rank"
            samples = f"{batch_size} sample{'' if batch_size == 1 else 's'}"
            raise BadOption(
                f"a batch of {samples} cannot be split over {ranks}; use '--batch-size {size}' or more, "
                f"or fewer workers"
            )
        self.part, self.batch_size, self.seed, self.shuffle = part, batch_size, seed, shuffle
        self.updates = -(-len(part) // batch_size)
        self._full = _spans(batch_size, rank, size, passes)
        self._last = _spans(len(part) - (self.updates - 1) * batch_size, rank, size, passes)

    def order(self, epoch: int) -> Tensor:
        """The order in which epoch number `epoch` takes the samples: positions in the part, int64."""
        if not self.shuffle:
            return torch.arange(len(self.part))
        # SeedSequence mixes the bits, so that neighbouring seeds and epochs have unrelated orders.
        mixed = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)[0]
        return torch.randperm(len(self.part), generator=torch.Generator().manual_seed(int(mixed)))

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Update]:
        """The updates of one epoch, this rank's part of each.

        Args:
            epoch: its number, from 0.
            skip: how many updates to leave out at its beginning (they were done before).
        """
        order, count, take = self.order(epoch), len(self.part), self.part.take
        for update in range(skip, self.updates):
            start = update * self.batch_size
            spans = self._last if update == self.updates - 1 else self._full
            batches = tuple(Batch(*take(order[start + a : start + b]), share) for a, b, share in spans)
            yield Update(min(self.batch_size, count - start), batches)


def _spans(samples: int, rank: int, size: int, passes: int) -> list[tuple[int, int, float]]:
    """Where `rank` begins and ends in an update of so many samples, and its share, for each pass."""
    spans = []
    for batch in torch.arange(samples).tensor_split(passes):
        mine = batch.tensor_split(size)[rank]
        start = int(mine[0]) if len(mine) else 0
        spans.append((start, start + len(mine), len(mine) / samples))
    return spans
