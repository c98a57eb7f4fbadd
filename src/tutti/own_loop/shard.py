"""The samples that `shard` deals to a rank, and the weight of their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, cast
from weakref import ref
from zlib import crc32

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
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.meetings import DETAILS, Purpose
from tutti.own_loop.origins import SampleCounts
from tutti.own_loop.places import IterationStart, ResumedIteration, each
from tutti.own_loop.structure import BLOCKS, Values, blocks_in, mapped, tensors_in
from tutti.strategies.base import Pace

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
    """

    def __init__(self, loader: DataLoader[Any], loop: OwnLoop) -> None:
        self.batches = cast("Iterable[list[Any]]", loader.batch_sampler)
        # The loop keeps the rank's own loader, and its processes, for as long as there is the user's.
        self.dataset, self.loop, self._loader = loader.dataset, loop, ref(loader)
        self.counts: list[SampleCounts] = []
        self.seen = 0
        self.start: IterationStart | None = None
        self.resumed: ResumedIteration | None = None
        self._fingerprint, self._check = list[int](), 0

    def __iter__(self) -> Iterator[list[Any]]:
        self.counts, self.seen, self._check = [], 0, 0
        if self.loop.comm.size > 1:
            self._fingerprint = fingerprint(length_of(self.dataset), self.dataset, self.loop.looked)
        self._pass_point()
        # Here, and not when the first batch is asked for: a sampler may draw random numbers now.
        return self._own(iter(self.batches))

    def _own(self, source: Iterator[list[Any]]) -> Iterator[list[Any]]:
        comm, together = self.loop.comm, self.loop.pace is Pace.TOGETHER
        left_out, source = self._leave_out(source)
        while True:
            ahead = self._ahead()
            drawn = [list(batch) for batch in islice(source, ahead)]
            if self.start is not None:
                self.start.drawn += len(drawn)
            if not _is_alike(self._fingerprint, self.loop):
                _refuse_other_samples(self._fingerprint[0], self.loop.comm)
            with self.loop.exchange.meetings.explaining(Purpose.DEAL):
                shared = cast("list[list[Any]]", comm.broadcast_object(drawn))
            for batch in shared:
                mine = self.seen % comm.size == comm.rank
                self.seen += 1
                self._note(batch)
                if together or mine:
                    if left_out:
                        left_out -= 1
                        continue
                    own = batch[cut(len(batch), comm.size)[comm.rank]] if together else batch
                    self.counts.append(SampleCounts(len(own), len(batch), self._check))
                    yield own or batch[:1]
            # There are no more; to find out once more would be to wait for ranks that have one to train on.
            if ahead is None or len(shared) < ahead:
                return

    def _leave_out(self, source: Iterator[list[Any]]) -> tuple[int, Iterator[list[Any]]]:
        """Leave out what was trained on earlier; returns how many of its own this rank leaves out yet."""
        resumed, self.resumed = self.resumed, None
        self._pass_point()
        if resumed is None:
            return 0, source
        left_out, source = resumed.leave_out(source)
        for batch in left_out:
            self._note(list(batch))
        if self.loop.comm.rank == 0:  # whose samples are dealt
            resumed.refuse_others(self._check)
        return resumed.own, source

    def _pass_point(self) -> None:
        loader = self._loader()
        if self.start is not None and loader is not None:
            self.start.pass_point(loader, self.loop.kept_samplers(loader))

    def _note(self, batch: list[Any]) -> None:
        if self.loop.keeps_places:
            self._check = crc32(repr(batch).encode(), self._check) or 1

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


def from_loader(
    loader: DataLoader[Any],
    loop: OwnLoop,
    start: IterationStart | None,
    resumed: ResumedIteration | None,
) -> Iterator[Any]:
    """The rank's own part of a loader's batches; it reads no other samples.

    Args:
        loader: the user's.
        loop: the ranks.
        start: notes what the iteration begins with; None: nobody wants to know.
        resumed: where to go on; None: at the beginning.
    """
    own = loop.loaders.get(loader)
    if own is None:
        own = _own_loader(loader, loop)
    if loader.persistent_workers:
        loop.loaders[loader] = own
    sampler = cast("ShardSampler", own.batch_sampler)
    sampler.start, sampler.resumed = start, resumed
    return _each_dealt(iter(own), sampler, loop, resumed.own if resumed else 0)


def _each_dealt(batches: Iterator[Any], sampler: ShardSampler, loop: OwnLoop, left_out: int) -> Iterator[Any]:
    before = [stepper.steps - left_out for stepper in loop.steppers]
    for batch in batches:
        yield _dealt(batch, sampler.counts.pop(0), loop)
    if loop.pace is not Pace.TOGETHER:
        _complete_round(sampler.seen, before, loop)


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


def compared(batches: Iterable[Any], loop: OwnLoop) -> Iterator[Any]:
    """The batches; the first is compared between the ranks (collective)."""
    source = iter(batches)
    if loop.comm.size == 1:
        yield from each(source)
        return
    first = list(islice(source, 1))
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
    yield from each(source)


def whole_batches(batches: Iterable[Any], loop: OwnLoop, left_out: int) -> Iterator[Any]:
    """Whole batches, dealt to the ranks in turn, but for the first ones of this rank's that are left out."""
    seen, before = 0, [stepper.steps - left_out for stepper in loop.steppers]
    for batch in batches:
        if seen % loop.comm.size == loop.comm.rank and seen >= left_out * loop.comm.size:
            length = _length(batch)
            yield _dealt(batch, SampleCounts(length, length), loop)
        seen += 1
    _complete_round(seen, before, loop)


def _complete_round(batches: int, before: Sequence[int], loop: OwnLoop) -> None:
    """Skip the last round of an epoch where this rank has no batch in it: all make as many steps or skips.

    Args:
        batches: of all ranks.
        before: how many steps each stepper had made when the epoch began.
        loop: the ranks.

    Raises:
        BadOption: a step is not that of one batch, so it is unknown how many the other ranks make.
    """
    left, own = batches % loop.comm.size, batches // loop.comm.size
    if not left or loop.comm.rank < left or not torch.is_grad_enabled():
        return
    pairs = list(enumerate(zip(loop.steppers, before, strict=False)))
    # In the order in which the loop steps: the other ranks do so now.
    for number, (stepper, steps) in sorted(pairs, key=lambda pair: pair[1][0].latest):
        made = stepper.steps - steps
        if made == own:
            stepper.skip()
        elif made and loop.pace is Pace.ABREAST:
            raise BadOption(
                f"this rank has made {made} steps with optimizer {number} for its {own} batches, and other "
                f"ranks have a batch more, as shard() was given {batches} for {loop.comm.size} ranks: with "
                "this strategy all must make equally many steps; make one for each batch, give a number of "
                "batches that the ranks can share evenly, or use the default strategy, Sync()"
            )


def own_part(batch: Any, loop: OwnLoop) -> Any:
    """The rank's own part of a batch."""
    comm, length = loop.comm, _length(batch)
    if comm.size == 1:
        return _dealt(batch, SampleCounts(length, length), loop)
    _check_lengths(batch, length)
    part = cut(length, comm.size)[comm.rank]
    counts = SampleCounts(part.stop - part.start, length)

    def own(values: Values) -> Values:
        of_samples = values.ndim > 0 if isinstance(values, BLOCKS) else len(values) == length
        return (values[part] if counts.own else values[:1]) if of_samples else values

    return _dealt(mapped(batch, own), counts, loop)


def _check_lengths(batch: Any, length: int) -> None:
    for block in blocks_in(batch):
        if block.ndim and len(block) != length:
            raise BadOption(
                f"a batch has tensors of {length} and of {len(block)} along the first dimension; shard() "
                "cuts batches whose tensors all have the samples along it"
            )


def _dealt(batch: Any, counts: SampleCounts, loop: OwnLoop) -> Any:
    """Note the counts for the next `step()`; outside training an empty part is really empty."""
    loop.begin_batch(counts)
    if counts.own == 0 and not torch.is_grad_enabled():
        return mapped(batch, _none_of)
    if loop.comm.size > 1:
        for tensor in tensors_in(batch):
            loop.counts_of[tensor] = counts
    return batch


def _none_of(values: Values) -> Values:
    """The empty part of one sample."""
    of_samples = values.ndim > 0 if isinstance(values, BLOCKS) else len(values) == 1
    return values[:0] if of_samples else values


def _length(batch: Any) -> int:
    for block in blocks_in(batch):
        if block.ndim:
            return len(block)
    raise BadOption(
        f"shard() needs batches with samples along the first dimension, not {type(batch).__name__}"
    )
