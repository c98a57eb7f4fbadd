"""An epoch that some ranks leave in the middle, and others, or the same, finish."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.states import saved_by
from tutti.data.batches import Batch, Batches, Queue
from tutti.data.parts import Part
from tutti.state import State


def numbered(count: int) -> Part:
    return Part(torch.arange(count).float().unsqueeze(1), torch.arange(count))


class Tickets:
    def __init__(self) -> None:
        self.next = 0

    def draw(self, count: int) -> int:
        self.next += count
        return self.next - count


def crew(kind: str, samples: int, batch_size: int, ranks: int, passes: int) -> list[Batches]:
    part, tickets = numbered(samples), Tickets()
    batches = [
        Batches(part, batch_size, rank, ranks, passes, seed=3, own=kind != "joint") for rank in range(ranks)
    ]
    return batches if kind != "queue" else [Queue(one, tickets.draw) for one in batches]


def taken(passes: tuple[Batch, ...]) -> list[int]:
    return [int(target) for batch in passes for target in batch.targets]


def leave(
    batches: list[Batches], epoch: int, rounds: list[int], first: list[int]
) -> tuple[list[int], list[State]]:
    """Make some rounds of an epoch; returns the samples taken, and the states."""
    found, at = [], list(first)
    for rank, (one, count) in enumerate(zip(batches, rounds, strict=True)):
        dealt = one.epoch(epoch, first[rank])
        for _ in range(count):
            made = next(dealt, None)
            if made is None:
                at[rank] = one.updates
                break
            number, passes = made
            found += taken(passes)
            at[rank] = number + 1 - epoch * one.updates
    return found, [one.state(epoch, at) for one in batches]


kinds = st.sampled_from(["joint", "own", "queue"])


@settings(max_examples=60, deadline=None)
@given(
    kinds,
    kinds,
    st.integers(20, 60),
    st.integers(4, 9),
    st.integers(1, 2),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.data(),
)
def test_every_sample_is_taken_once(
    kind: str, other: str, samples: int, batch_size: int, passes: int, sizes: list[int], data: st.DataObject
) -> None:
    epoch, found = 2, []
    first = [0] * sizes[0]
    batches = crew(kind, samples, batch_size, sizes[0], passes)
    if kind == "queue":  # Earlier epochs' tickets are gone.
        for earlier in range(epoch):
            for one in batches:
                list(one.epoch(earlier))
    for size in sizes[1:]:
        most = batches[0].updates
        same = data.draw(st.integers(0, most))
        least = int(kind == "queue")  # Ranks meet in an epoch once each has asked for a batch of it.
        rounds = [same if kind == "joint" else data.draw(st.integers(least, most)) for _ in batches]
        more, states = leave(batches, epoch, rounds, first)
        found += more
        if data.draw(st.booleans()):
            kind = other
        batches = crew(kind, samples, batch_size, size, passes)
        first = [
            one.load_state(epoch, saved) for one, saved in zip(batches, saved_by(states, size), strict=True)
        ]
    for one, start in zip(batches, first, strict=True):
        found += [target for _, passes_ in one.epoch(epoch, start) for target in taken(passes_)]
    assert sorted(found) == list(range(samples))
    following = [
        target for one in batches for _, passes_ in one.epoch(epoch + 1) for target in taken(passes_)
    ]
    assert sorted(following) == list(range(samples))


@pytest.mark.parametrize("kind", ["joint", "own"])
def test_as_many_ranks_have_their_own_next_batches(kind: str) -> None:
    whole = [[taken(passes) for _, passes in one.epoch(1)] for one in crew(kind, 50, 6, 3, 2)]
    _, states = leave(crew(kind, 50, 6, 3, 2), 1, [2, 2, 2], [0, 0, 0])
    for rank, (one, saved) in enumerate(zip(crew(kind, 50, 6, 3, 2), saved_by(states), strict=True)):
        first = one.load_state(1, saved)
        assert first == 2
        assert [taken(passes) for _, passes in one.epoch(1, first)] == whole[rank][first:]


def test_the_epoch_after_a_cut_short_one_begins_at_its_usual_number() -> None:
    before = crew("own", 50, 6, 3, 1)
    _, states = leave(before, 1, [1, 1, 1], [0, 0, 0])
    for one, saved in zip(crew("own", 50, 6, 2, 1), saved_by(states, 2), strict=True):
        first = one.load_state(1, saved)
        numbers = [number for number, _ in one.epoch(1, first)]
        assert numbers == list(range(one.updates + first, 2 * one.updates))
        assert len(numbers) == 3, "of the 50 - 3 * 6 samples that are left a round takes 2 * 6"


@pytest.mark.parametrize(("ranks", "stop"), [(3, None), (2, None), (3, 2), (1, 2)])
def test_a_queue_deals_every_batch_after_a_state_between_two_epochs_or_at_a_short_end(
    ranks: int, stop: int | None
) -> None:
    """Each rank has drawn its first ticket of the next epoch then, and trained on nothing of it."""
    before, epoch = crew("queue", 50, 6, 3, 1), 1 if stop is None else 0
    found = [target for one in before for _, passes in one.epoch(0, 0, stop) for target in taken(passes)]
    states = [one.state(epoch, [0 if stop is None else stop] * 3) for one in before]
    after = crew("queue", 50, 6, ranks, 1)
    for one, saved in zip(after, saved_by(states, ranks), strict=True):
        one.load_state(epoch, saved)
    rest = [target for one in after for _, passes in one.epoch(epoch) for target in taken(passes)]
    assert sorted(rest if stop is None else found + rest) == list(range(50))


def test_a_state_takes_no_batch_from_who_goes_on_training() -> None:
    batches = crew("queue", 50, 6, 3, 1)
    dealt = [one.epoch(0) for one in batches]
    found = [target for one in dealt for target in taken(next(one)[1])]
    for one in batches:
        one.state(0, [1, 1, 1])
    found += [target for one in dealt for _, passes in one for target in taken(passes)]
    assert sorted(found) == list(range(50))
