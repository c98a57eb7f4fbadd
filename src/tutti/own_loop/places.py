"""Progress of an iteration over `shard`, so that a later program goes on with the batch behind that.

    before    start ─ batch 1 ─ batch 2 ─ step ─ save
    later     start ─ 1, 2 left out ─────────────────── batch 3 ─ ...

The later iteration begins with the random numbers that the earlier one began with, and a sampler that has a
state with that, so the same batches are drawn; the samples of the first ones are not read. After that both go
on as they were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tutti.errors import BadOption
from tutti.object_state import load_state_of, state_of
from tutti.state import Values
from tutti.training.module_state import load_random_state, random_state

T = TypeVar("T")


@dataclass
class IterationStart:
    """The state of everything that a sampler may draw from, before the first batch of an iteration.

    Attributes:
        length: the number of samples of the data set; -1: unknown.
        first: the number of batches of all ranks to leave out, as they were trained on earlier.
        random: of this process's random numbers.
        generators: of the loader's own.
        samplers: of the user's samplers that checkpoints have.
        check: a checksum of the first batch's indices; 0: it has none, or none is drawn yet.
    """

    length: int = -1
    first: int = 0
    random: Values = field(default_factory=dict)
    generators: list[Tensor] = field(default_factory=list)
    samplers: list[Any] = field(default_factory=list)
    check: int = 0

    def begin(
        self, batches: Iterable[T], generators: Sequence[torch.Generator] = (), samplers: Sequence[Any] = ()
    ) -> Iterator[T]:
        """Begin the iteration over `batches`, or go on with it behind the first ones.

        Args:
            batches: of all ranks.
            generators: that the samplers draw from.
            samplers: those whose states checkpoints have.
        """
        random, states = random_state(), [deepcopy(state_of(one, "sampler")) for one in samplers]
        if not self.random:
            self.random, self.samplers = random, states
            self.generators = [one.get_state() for one in generators]
            return iter(batches)
        load_random_state(self.random)
        for sampler, state in zip(samplers, self.samplers, strict=False):
            load_state_of(sampler, deepcopy(state))
        for generator, numbers in zip(generators, self.generators, strict=False):
            generator.set_state(numbers)
        source = iter(batches)
        for number, one in enumerate(islice(source, self.first)):
            if not number and self.check not in (0, check_of(one)):
                raise BadOption(
                    "the loop cannot go on in the middle of its epoch: the loader's sampler gives other "
                    "samples than before the checkpoint. Give the loader the same data set and batch size, "
                    "and a sampler whose order depends on torch.manual_seed, on the epoch (set_epoch), or on "
                    "a torch.Generator or its own state_dict() that tutti.checkpoints() is given"
                )
        load_random_state(random)
        for sampler, state in zip(samplers, states, strict=True):
            # Drawing has changed it as it did then; the program may have changed more.
            if repr(state_of(sampler, "sampler")) != repr(state):
                load_state_of(sampler, state)
        return source


def length_of(value: Any) -> int:
    """Return the number of samples; -1: unknown."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return -1


def check_of(indices: Any) -> int:
    """Return a checksum of a batch's indices, which is not 0."""
    return crc32(repr(list(indices)).encode()) or 1


def generators_of(batches: object) -> list[torch.Generator]:
    """Return the generators that a loader draws from, itself or in its samplers."""
    found = (getattr(owner, "generator", None) for owner in (batches, *samplers_of(batches)))
    return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))


def samplers_of(batches: object) -> list[Any]:
    """Return the samplers of a loader."""
    if not isinstance(batches, DataLoader):
        return []
    sampler: Any = batches.batch_sampler
    return [batches.sampler, sampler, getattr(sampler, "sampler", None)]
