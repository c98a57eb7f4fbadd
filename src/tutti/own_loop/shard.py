"""The samples that `shard` deals to a rank, and the weight of their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tutti.comm.base import Communicator, cut
from tutti.errors import BadOption
from tutti.own_loop.fingerprints import are_alike, fingerprint, length_of
from tutti.own_loop.loop import OwnLoop, SampleCounts
from tutti.own_loop.meetings import DETAILS, Purpose
from tutti.own_loop.places import IterationStart, check_of, generators_of
from tutti.own_loop.structure import BLOCKS, Values, blocks_in, mapped
from tutti.strategies.base import Pace
from tutti.training.module_state import load_random_state, random_state

LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
"""The options of a loader that the loader of a rank's part has, too."""

AHEAD = 32
"""Batches of indices that are drawn from a loader's sampler at a time, if it draws no random numbers then."""

AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw all random numbers of an epoch at its beginning."""


class ShardSampler:
    """A batch sampler: this rank's part of each of rank 0's batches, or whole batches in turn.

    Every rank draws them all from a sampler of its own, so that random numbers go on as in plain torch. What
    is dealt are those of rank 0, as the samplers of programs that are seeded rank by rank differ.

    Attributes:
        counts: of the batches that are dealt and not yet loaded.
        start: what the iteration begins with.
    """

    def __init__(self, loader: DataLoader[Any], loop: OwnLoop) -> None:
        # Not the loader itself: the rank's own, and its processes, live as long as that does.
        self.batches = cast("Iterable[list[Any]]", loader.batch_sampler)
        self.dataset, self.loop = loader.dataset, loop
        self._generators, self._samplers = generators_of(loader), loop.kept_samplers(loader)
        self.counts: list[SampleCounts] = []
        self.start: IterationStart | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        loop, comm, start, together = self.loop, self.loop.comm, self.start, self.loop.pace is Pace.TOGETHER
        own_print = fingerprint(length_of(self.dataset), self.dataset, loop.looked) if comm.size > 1 else []
        self.counts, seen, in_rounds = [], 0, deals_in_rounds(loop)
        source = start.begin(self.batches, self._generators, self._samplers) if start else iter(self.batches)
        while True:
            ahead = self._ahead()
            drawn = [list(batch) for batch in islice(source, ahead)]
            if start and drawn and not start.check:
                start.check = check_of(drawn[0])
            if not _is_alike(own_print, loop):
                _refuse_other_samples(own_print[0], comm)
            with loop.exchange.meetings.explaining(Purpose.DEAL):
                shared = cast("list[list[Any]]", comm.broadcast_object(drawn))
            for batch in shared[: len(shared) // comm.size * comm.size] if in_rounds else shared:
                mine = seen % comm.size == comm.rank
                seen += 1
                if together or mine:
                    own = batch[cut(len(batch), comm.size)[comm.rank]] if together else batch
                    self.counts.append(SampleCounts(len(own), len(batch)))
                    yield own or batch[:1]
            # There are no more; to find out once more would be to wait for ranks that have one to train on.
            if ahead is None or len(shared) < ahead:
                return

    def _ahead(self) -> int | None:
        """The number of batches to draw at a time; None: all, so that no rank waits for rank 0."""
        if self.loop.pace is Pace.FREE and isinstance(self.batches, Sized):
            return None
        # No rank draws between two steps that another makes without drawing.
        turn = 1 if self.loop.pace is Pace.TOGETHER else self.loop.comm.size
        return AHEAD * turn if self.loop.comm.size > 1 and _draws_at_once(self.batches) else turn


def _draws_at_once(batches: Iterable[list[Any]]) -> bool:
    if type(batches) is not BatchSampler or type(batches.sampler) not in AT_ONCE:
        return False
    return not (isinstance(batches.sampler, RandomSampler) and batches.sampler.replacement)


Dealt = tuple[Any, SampleCounts]
"""A batch of this rank, with its counts."""


def from_loader(loader: DataLoader[Any], loop: OwnLoop, start: IterationStart | None) -> Iterator[Dealt]:
    """Deal the rank's own part of a loader's batches; it reads no other samples."""
    own = loop.loaders.get(loader)
    if own is None:
        own = _own_loader(loader, loop)
    if loader.persistent_workers:
        loop.loaders[loader] = own
    sampler = cast("ShardSampler", own.batch_sampler)
    sampler.start = start
    random = random_state() if start and start.first else None
    # Here, and not when the first batch is asked for: a loader draws random numbers now.
    batches = iter(own)
    if random is not None:
        load_random_state(random)
    return _each_dealt(batches, sampler)


def _each_dealt(batches: Iterator[Any], sampler: ShardSampler) -> Iterator[Dealt]:
    for batch in batches:
        yield batch, sampler.counts.pop(0)


def _own_loader(loader: DataLoader[Any], loop: OwnLoop) -> DataLoader[Any]:
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


def _is_alike(mine: list[int], loop: OwnLoop) -> bool:
    """Return whether all ranks, which come to be dealt samples, have data like this rank's (collective)."""
    table = loop.exchange.meetings.come(Purpose.DEAL, mine)
    if table is None:
        return True
    prints = table[:, 1 : 1 + DETAILS].tolist()
    return all(are_alike(prints[0], other) for other in prints)


def _refuse_other_samples(length: int, comm: Communicator) -> None:
    lengths = cast("list[int]", comm.all_gather_objects(length))
    raise BadOption(
        (
            f"the ranks' data sets are of different lengths: by rank, {lengths}"
            if len(set(lengths)) > 1
            else f"the ranks' data sets hold different samples, {length} on each, or in another order"
        )
        + "; shard() deals numbers of samples, so give every rank the whole data set, and seed what splits "
        "or shuffles it: random_split(..., generator=torch.Generator().manual_seed(0)), "
        "numpy.random.default_rng(0), random.seed(0), train_test_split(..., random_state=0)"
    )


def from_batches(batches: Iterable[Any], loop: OwnLoop, start: IterationStart | None) -> Iterator[Dealt]:
    """Deal this rank's part of each batch, or whole batches in turn."""
    comm = loop.comm
    last = comm.size - 1 if deals_in_rounds(loop) else comm.rank
    source = start.begin(batches, generators_of(batches)) if start else iter(batches)
    for number, batch in enumerate(_compared(source, loop)):
        if loop.pace is Pace.TOGETHER:
            yield own_part(batch, comm)
            continue
        if number % comm.size == comm.rank:
            own = batch
        if number % comm.size == last:
            yield own, SampleCounts(_length(own), _length(own))


def _compared(source: Iterator[Any], loop: OwnLoop) -> Iterator[Any]:
    """Yield the batches; the first is compared between the ranks (collective)."""
    first = list(islice(source, 1)) if loop.comm.size > 1 else []
    if loop.comm.size > 1:
        length = _length(first[0]) if first else 0
        if not _is_alike(fingerprint(length, first, {}), loop):
            lengths = cast("list[int]", loop.comm.all_gather_objects(length))
            how = "are the iterable's, and every rank's must yield the same: seed what shuffles its samples"
            if len(set(lengths)) > 1:
                raise BadOption(f"the first batches have, by rank, {lengths} samples; they {how}")
            warnings.warn(
                f"the ranks' first batches differ: they {how} (random transforms may differ)", stacklevel=2
            )
    yield from first
    for batch in source:  # noqa: UP028 - `yield from` would end a stream that the program goes on with
        yield batch


def deals_in_rounds(loop: OwnLoop) -> bool:
    """Return whether all ranks get equally many batches, and those of an unfinished round are left out."""
    return loop.pace is not Pace.TOGETHER and loop.comm.size > 1 and torch.is_grad_enabled()


def own_part(batch: Any, comm: Communicator) -> Dealt:
    """Return the rank's own part of a batch; one sample, where it has none."""
    length = _length(batch)
    if comm.size == 1:
        return batch, SampleCounts(length, length)
    _check_lengths(batch, length)
    part = cut(length, comm.size)[comm.rank]
    counts = SampleCounts(part.stop - part.start, length)

    def own(values: Values) -> Values:
        of_samples = values.ndim > 0 if isinstance(values, BLOCKS) else len(values) == length
        return (values[part] if counts.own else values[:1]) if of_samples else values

    return mapped(batch, own), counts


def _check_lengths(batch: Any, length: int) -> None:
    for block in blocks_in(batch):
        if block.ndim and len(block) != length:
            raise BadOption(
                f"a batch has tensors of {length} and of {len(block)} along the first dimension; shard() "
                "cuts batches whose tensors all have the samples along it"
            )


def emptied(batch: Any) -> Any:
    """Return the empty part of a batch of one sample."""
    return mapped(batch, _none_of)


def _none_of(values: Values) -> Values:
    of_samples = values.ndim > 0 if isinstance(values, BLOCKS) else len(values) == 1
    return values[:0] if of_samples else values


def _length(batch: Any) -> int:
    for block in blocks_in(batch):
        if block.ndim:
            return len(block)
    raise BadOption(
        f"shard() needs batches with samples along the first dimension, not {type(batch).__name__}"
    )
