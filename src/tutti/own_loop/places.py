"""Progress of an iteration over `shard`, so that a later program goes on with the batch behind that.

    before    start ─ sampler draws ─ batch 1 ─ batch 2 ─ step ─ save
    later     start ─ sampler draws ─ 1, 2 left out ───────────── batch 3 ─ ...

The later iteration begins with the random numbers that the earlier one began with, and a sampler that has a
state with that, so the same batches are drawn; nobody reads those that are left out. After that both go on as
they were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

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
    """The random numbers at the points of an iteration's beginning where a sampler may draw some.

    Between these points a loader draws a seed for its workers, or does not, if it has them already.

    Attributes:
        random: the states of this process's generators, by points.
        generators: those of the loader's own, by points.
        samplers: the states of the user's samplers, at the first point.
        again: how many of the points are still to be gone through again.
        drawn: how many batches of all ranks were drawn; a loader with workers draws more than it has dealt.
        length: how many samples its data set has; -1: nobody knows.
    """

    random: list[Values] = field(default_factory=list)
    generators: list[list[Tensor]] = field(default_factory=list)
    samplers: list[Any] = field(default_factory=list)
    again: int = 0
    drawn: int = 0
    length: int = -1

    def pass_point(self, batches: object, samplers: Sequence[Any] = ()) -> None:
        """Note the random numbers at the next point; or, in an iteration that goes on, go back to them.

        Args:
            batches: what the iteration is over.
            samplers: those whose states checkpoints have.
        """
        if not self.again:
            if not self.random:
                self.samplers = [deepcopy(state_of(one, "sampler")) for one in samplers]
            self.random.append(random_state())
            self.generators.append([one.get_state() for one in generators_of(batches)])
            return
        point = len(self.random) - self.again
        self.again -= 1
        if not point:
            for one, state in zip(samplers, self.samplers, strict=False):
                load_state_of(one, deepcopy(state))
        load_random_state(self.random[point])
        for generator, state in zip(generators_of(batches), self.generators[point], strict=False):
            generator.set_state(state)


@dataclass(frozen=True)
class LoopPlace:
    """Progress of a rank in an iteration.

    Attributes:
        first: how many batches of all ranks were left out at its beginning.
        dealt: how many this rank was dealt since.
        stepped: how many of these it has trained on.
        check: a checksum of the samples up to the last of those; 0: unknown.
    """

    first: int
    dealt: int
    stepped: int
    check: int


@dataclass(eq=False)
class ResumedIteration:
    """The place where an iteration goes on.

    Attributes:
        start: what it began with.
        first: how many batches of all ranks are left out.
        own: how many of this rank's are left out behind these.
        drawn: how many batches had been drawn, of all ranks.
        check: a checksum of the samples that are left out; 0: unknown.
    """

    start: IterationStart
    first: int
    own: int
    drawn: int
    check: int

    @classmethod
    def of(
        cls, start: IterationStart, places: list[LoopPlace], rank: int, ranks: int, together: bool
    ) -> ResumedIteration:
        """Find where a rank goes on.

        Args:
            start: what the iteration began with.
            places: those of the ranks that have left it.
            rank: the number of the one that goes on.
            ranks: how many go on.
            together: they share each batch; else batches are dealt to them in turn.
        """
        before, begun = len(places), places[0].first
        stepped = [place.stepped for place in places]
        rounds = min(stepped)
        own = 0
        if together:
            first, drawn = begun + rounds, begun + places[0].dealt
        elif ranks == before:
            first, own = begun + before * rounds, stepped[rank] - rounds
            drawn = begun + before * max(place.dealt for place in places)
        else:
            first = begun + sum(stepped)
            drawn = begun + sum(place.dealt for place in places)
        ends = {
            begun + (place.stepped if together else (place.stepped - 1) * before + number + 1): place.check
            for number, place in enumerate(places)
            if place.stepped
        }
        drawn, start.drawn = max(first, drawn, start.drawn), first
        return cls(start, first, own, drawn, ends.get(first, 0))

    def begin(self, samplers: Sequence[Any] = ()) -> None:
        """Note the state with which the loop goes on when `leave_out` has drawn batches.

        Args:
            samplers: those whose states checkpoints have.
        """
        self._after = random_state()
        self._samplers = [(one, deepcopy(state_of(one, "sampler"))) for one in samplers]

    def interrupt(self) -> None:
        """Go back to the random numbers with which the loop goes on, until the first batch is asked for."""
        load_random_state(self._after)

    def leave_out(self, source: Iterator[T]) -> tuple[list[T], Iterator[T]]:
        """Draw what was drawn before; returns the batches that are left out, and an iterator of the rest."""
        again = list(islice(source, self.drawn))
        load_random_state(self._after)
        for one, state in self._samplers:
            # Drawing has changed it as it did then; the program may have changed more.
            if not _alike(state_of(one, "sampler"), state):
                load_state_of(one, deepcopy(state))
        return again[: self.first], chain(again[self.first :], source)

    def refuse_others(self, check: int) -> None:
        """Refuse batches that are not those that were trained on.

        Args:
            check: a checksum of the samples that are left out.
        """
        if self.check and check != self.check:
            raise BadOption(
                "the loop cannot go on in the middle of its epoch: the loader's sampler gives other samples "
                "than before the checkpoint. Have its order depend on torch.manual_seed or on a "
                "torch.Generator that tutti.checkpoints() is given, or on the epoch (set_epoch), or give it "
                "the sampler, with state_dict() and load_state_dict(). Give the loader the same data set and "
                "batch size, and begin the same loops over tutti.shard()"
            )


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


def _alike(one: Any, other: Any) -> bool:
    """Return whether two states are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other)


def behind(
    batches: Iterable[T], start: IterationStart | None, resumed: ResumedIteration | None
) -> Iterator[T]:
    """Begin an iteration over batches that have no indices; those that are left out are read all the same."""
    if start is not None:
        start.pass_point(batches)
    return _go_on(iter(batches), batches, start, resumed)


def _go_on(
    source: Iterator[T], batches: Iterable[T], start: IterationStart | None, resumed: ResumedIteration | None
) -> Iterator[T]:
    if start is not None:
        start.pass_point(batches)
    if resumed is not None:
        _, source = resumed.leave_out(source)
    yield from each(source)


def each(source: Iterator[T]) -> Iterator[T]:
    """Yield what comes. Leaving that does not end the source, as `yield from` does: a stream may go on."""
    for one in source:  # noqa: UP028
        yield one
