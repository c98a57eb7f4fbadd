"""Progress of an iteration over `shard`, so that a later program continues with the next batch.

    before    start ─ batch 1 ─ batch 2 ─ step ─ save
    later     start ─ 1, 2 left out ─────────────────── batch 3 ─ ...

The later iteration starts with the earlier one's random numbers, so the same batches are drawn; the samples
of the first ones are not read. After that the random numbers continue as they were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.errors import BadOption
from tutti.state import Values
from tutti.training.module_state import load_random_state, random_state

T = TypeVar("T")


@dataclass
class IterationStart:
    """The state of everything that a sampler may draw from, before the first batch of an iteration."""

    length: int = -1  # the number of samples of the data set; -1: unknown
    first: int = 0  # the number of batches of all ranks to leave out, as they were trained on earlier
    random: Values = field(default_factory=dict)  # of this process's random numbers
    generators: list[Tensor] = field(default_factory=list)  # of the loader's own
    check: int = 0  # a checksum of the first batch's indices; 0: there is none yet

    def begin(self, batches: Iterable[T], generators: Sequence[torch.Generator] = ()) -> Iterator[T]:
        """Begin the iteration over the batches of all ranks, drawn from generators, or continue it."""
        random = random_state()
        if not self.random:
            self.random = random
            self.generators = [one.get_state() for one in generators]
            return iter(batches)
        load_random_state(self.random)
        for generator, numbers in zip(generators, self.generators, strict=False):
            generator.set_state(numbers)
        source = iter(batches)
        for number, one in enumerate(islice(source, self.first)):
            if not number and self.check not in (0, check_of(one)):
                raise BadOption(
                    "the loop cannot continue in the middle of its epoch: the loader's sampler gives other "
                    "samples than before the checkpoint. Give the loader the same data set and batch size, "
                    "and a sampler whose order depends on torch.manual_seed, on the epoch (set_epoch), or on "
                    "a torch.Generator that tutti.checkpoints() is given"
                )
        load_random_state(random)
        return source


def length_of(value: Any) -> int:
    """Return the number of samples; -1: unknown."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return -1


def check_of(indices: Any) -> int:
    """Return a checksum of a batch's indices, never 0."""
    return crc32(repr(list(indices)).encode()) or 1


def generators_of(batches: object) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from."""
    owners: list[Any] = [batches]
    if isinstance(batches, DataLoader):
        owners += [batches.sampler, batches.batch_sampler, getattr(batches.batch_sampler, "sampler", None)]
    generators = (getattr(owner, "generator", None) for owner in owners)
    return list(dict.fromkeys(one for one in generators if isinstance(one, torch.Generator)))
