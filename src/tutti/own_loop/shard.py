"""The samples that `shard` deals to a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain, islice
from typing import Any, Final, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tutti.comm.base import Communicator, cut
from tutti.errors import BadOption
from tutti.own_loop.loop import LoopBatches, OpenIteration, SampleCounts
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.places import IterationStart, check_of, generators_of, length_of
from tutti.training.module_state import load_random_state, random_state

LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
"""The options of a loader that the loader of a rank's part takes over."""

AHEAD = 32
"""Batches of indices drawn from a loader's sampler at a time, if that draws no random numbers."""

AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw all random numbers of an epoch at its beginning."""

Dealt = tuple[Any, SampleCounts]
"""A batch of this rank, with its counts."""

Block = Tensor | np.ndarray[Any, Any]
"""Numbers that may have the samples along their first dimension."""

BLOCKS: Final = (Tensor, np.ndarray)
"""Their types."""

Values = Block | list[Any] | tuple[Any, ...]
"""A part of a batch with an item for each of its samples."""

PLAIN: Final = (int, float, str, bytes)
"""Types in the lists that a program may have besides the tensors of a batch."""


def dealt_to(loop: LoopBatches, batches: Iterable[Any]) -> Iterator[Any]:
    """Return the batches that one iteration over `shard(batches)` yields."""
    loads = (
        isinstance(batches, DataLoader)
        # A class of the program may do more than load: change the batches, or never end.
        and type(batches).__iter__ is DataLoader.__iter__
        and batches.batch_sampler is not None
        and not isinstance(batches.dataset, IterableDataset)
    )
    mine = OpenIteration()
    if loop.keeps_places and torch.is_grad_enabled():
        mine.start = loop.start_of(batches)
    deal = _from_loader if loads else _from_batches
    return _in_loop(deal(cast("DataLoader[Any]", batches), loop, mine.start), mine, loop)


def _in_loop(dealt: Iterator[Dealt], mine: OpenIteration, loop: LoopBatches) -> Iterator[Any]:
    """Yield the dealt batches; the iteration is open from the first one on."""
    loop.exchange.meetings.iterations += torch.is_grad_enabled()
    loop.open.append(mine)
    try:
        for batch, counts in dealt:
            loop.begin_batch(mine, counts)
            # In training the one sample is for backward(), and weighs nothing.
            yield batch if counts.own or torch.is_grad_enabled() else mapped(batch, _none_of)
    finally:
        loop.close(mine)


class ShardSampler:
    """A batch sampler: this rank's part of each of rank 0's batches.

    Every rank draws all batches from its own sampler, so that random numbers continue as in plain torch. Rank
    0's are dealt, as programs may seed their samplers differently on each rank.
    """

    def __init__(self, loader: DataLoader[Any], loop: LoopBatches) -> None:
        # Not the loader itself: the rank's own, and its processes, live as long as that does.
        self.batches = cast("Iterable[list[Any]]", loader.batch_sampler)
        self.dataset, self.loop = loader.dataset, loop
        self._generators = generators_of(loader)
        self.counts: list[SampleCounts] = []  # of the batches dealt and not yet loaded
        self.start: IterationStart | None = None  # if checkpoints are taken

    def __iter__(self) -> Iterator[list[Any]]:
        loop, comm, start = self.loop, self.loop.comm, self.start
        self.counts, indices = [], _checksum(self.dataset)
        source = start.begin(self.batches, self._generators) if start else iter(self.batches)
        ahead = AHEAD if comm.size > 1 and _draws_at_once(self.batches) else 1
        while True:
            drawn = [list(batch) for batch in islice(source, ahead)]
            if start and drawn and not start.check:
                start.check = check_of(drawn[0])
            table = loop.exchange.meetings.come(Purpose.DEAL, length_of(self.dataset), indices)
            if table is not None:
                raise BadOption(
                    f"the ranks' data sets differ in length, by rank {table[:, 0].tolist()}, or in the "
                    "indices of a Subset; give every rank the whole data set, and seed its split: "
                    "random_split(..., generator=torch.Generator().manual_seed(0))"
                )
            shared = cast("list[list[Any]]", comm.broadcast_object(drawn))
            for batch in shared:
                own = batch[cut(len(batch), comm.size)[comm.rank]]
                self.counts.append(SampleCounts(len(own), len(batch)))
                yield own or batch[:1]
            # Asking once more would make this rank wait for others that still train on the last batch.
            if len(shared) < ahead:
                return


def _draws_at_once(batches: Iterable[list[Any]]) -> bool:
    if type(batches) is not BatchSampler or type(batches.sampler) not in AT_ONCE:
        return False
    return not (isinstance(batches.sampler, RandomSampler) and batches.sampler.replacement)


def _checksum(dataset: Any) -> int:
    """Return a checksum of the indices of a subset, and of nested subsets."""
    check = 0
    while isinstance(dataset, Subset):
        check, dataset = crc32(np.asarray(dataset.indices).tobytes(), check), dataset.dataset
    return check


def _from_loader(loader: DataLoader[Any], loop: LoopBatches, start: IterationStart | None) -> Iterator[Dealt]:
    """Deal the rank's own part of a loader's batches; it reads no other samples."""
    own = loop.loaders.get(loader)
    if own is None:
        own = _own_loader(loader, loop)
    if loader.persistent_workers:
        loop.loaders[loader] = own
    sampler = cast("ShardSampler", own.batch_sampler)
    sampler.start = start
    random = random_state() if start and start.first else None
    # Now, not when the first batch is requested: this draws random numbers.
    batches = iter(own)
    if random is not None:
        load_random_state(random)
    return ((batch, sampler.counts.pop(0)) for batch in batches)


def _own_loader(loader: DataLoader[Any], loop: LoopBatches) -> DataLoader[Any]:
    theirs = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(theirs, DistributedSampler) and theirs.num_replicas > 1 and loop.comm.size > 1:
        raise BadOption(
            f"the loader has a DistributedSampler, which deals each of {theirs.num_replicas} ranks a part, "
            "and shard() would deal the ranks parts of that; make the loader with shuffle=True "
            "or another sampler of all samples"
        )
    sampler = ShardSampler(loader, loop)
    kept: dict[str, Any] = {option: getattr(loader, option) for option in LOADER_OPTIONS}
    return DataLoader(loader.dataset, batch_sampler=cast("BatchSampler", sampler), **kept)


def _from_batches(batches: Iterable[Any], loop: LoopBatches, start: IterationStart | None) -> Iterator[Dealt]:
    """Deal this rank's part of each batch; the length of the first is compared between the ranks."""
    source = start.begin(batches, generators_of(batches)) if start else iter(batches)
    first = list(islice(source, 1))
    table = loop.exchange.meetings.come(Purpose.DEAL, *map(_length, first))
    if table is not None:
        raise BadOption(
            f"the first batches have, by rank, {table[:, 0].tolist()} samples; they are the iterable's, and "
            "every rank's must yield the same: seed what shuffles its samples"
        )
    for batch in chain(first, source):
        yield own_part(batch, loop.comm)


def own_part(batch: Any, comm: Communicator) -> Dealt:
    """Return the rank's own part of a batch; one sample if it has none."""
    length = _length(batch)
    if comm.size == 1:
        return batch, SampleCounts(length, length)
    for block in blocks_in(batch):
        if block.ndim and len(block) != length:
            raise BadOption(
                f"a batch has tensors of {length} and of {len(block)} along the first dimension; shard() "
                "cuts batches whose tensors all have the samples along it"
            )
    part = cut(length, comm.size)[comm.rank]
    counts = SampleCounts(part.stop - part.start, length)
    return mapped(batch, _taking(part if counts.own else slice(1), length)), counts


def _taking(part: slice, length: int) -> Callable[[Values], Values]:
    """Return a function that takes a part of the samples of values with `length` samples."""

    def take(values: Values) -> Values:
        of_samples = values.ndim > 0 if isinstance(values, BLOCKS) else len(values) == length
        return values[part] if of_samples else values

    return take


_none_of = _taking(slice(0), 1)
"""Take the empty part of a batch of one sample."""


def _length(batch: Any) -> int:
    for block in blocks_in(batch):
        if block.ndim:
            return len(block)
    raise BadOption(
        f"shard() needs batches with samples along the first dimension, not {type(batch).__name__}"
    )


def blocks_in(batch: Any) -> Iterator[Block]:
    """Yield the tensors and arrays in a batch, which may be nested."""
    if isinstance(batch, BLOCKS):
        yield batch
    elif isinstance(batch, (tuple, list, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from blocks_in(value)


def mapped(batch: Any, function: Callable[[Values], Values]) -> Any:
    """Apply `function` to all tensors, arrays, and lists and tuples of numbers or text in a batch."""
    if isinstance(batch, BLOCKS):
        return function(batch)
    if batch is None or isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, Mapping):
        values = {key: mapped(value, function) for key, value in batch.items()}
        if isinstance(batch, dict) or not isinstance(batch, MutableMapping):
            return values
        moved = copy.copy(batch)  # such as a batch of Hugging Face's collators
        moved.update(values)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(value, PLAIN) for value in batch):
            return function(batch)
        return type(batch)(mapped(value, function) for value in batch)
    raise BadOption(
        f"shard() can cut tensors, arrays, and tuples, lists and dicts of them, not {type(batch).__name__}"
    )
