"""A queue deals every batch of an epoch once, to the rank that asks; and shares by speed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.data import Batches, Part, Queue
from tutti.data.batches import by_speed


def numbered(count: int) -> Part:
    """A part whose inputs and targets are the samples' own numbers."""
    return Part(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count))


def queues(count: int, batch_size: int, size: int, passes: int = 1) -> list[Queue]:
    tickets = itertools.count()
    return [
        Queue(Batches(numbered(count), batch_size, rank, size, passes, own=True), lambda count: next(tickets))
        for rank in range(size)
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 120), st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 4))
)
def test_all_batches_are_those_of_one_rank(count, batch_size, size, passes, turns):
    dealers = queues(count, batch_size, size, passes)
    alone = Batches(numbered(count), batch_size)
    for epoch in range(3):
        running = {rank: dealer.epoch(epoch) for rank, dealer in enumerate(dealers)}
        found = []
        for turn in itertools.chain(turns, itertools.cycle(range(size))):
            if not running:
                break
            update = next(running[turn % size], None) if turn % size in running else ()
            if update is None:
                del running[turn % size]
            elif update:
                found.append(torch.cat([batch.targets for batch in update[1]]))
                assert sum(batch.share for batch in update[1]) == pytest.approx(1)
        expected = [batch.targets for _, (batch,) in alone.epoch(epoch)]
        assert len(found) == len(expected)
        assert all(any(torch.equal(one, other) for other in found) for one in expected)


def test_a_round_is_one_batch_for_each_rank():
    first, second = queues(70, 10, 2)
    updates = first.epoch(0)
    assert [next(updates)[0] for _ in range(5)] == [0, 0, 1, 1, 2]
    assert [number for number, _ in second.epoch(0)] == [2, 3]
    assert list(updates) == []
    assert [number for number, _ in second.epoch(1)] == [4, 5, 5, 6, 6, 7]
    assert [number for number, _ in first.epoch(1)] == [4], "the ticket that told it of the end"
    assert first.updates == 4


def test_the_fewest_samples_of_a_pass_are_those_of_the_last_batch():
    assert queues(35, 10, 2)[0].fewest == 5
    assert queues(35, 10, 2, passes=2)[0].fewest == 2


def ranks(count: int, batch_size: int, size: int, **rest: object) -> Iterator[Batches]:
    return (Batches(numbered(count), batch_size, rank, size, **rest) for rank in range(size))


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("count", [100, 83, 61])
def test_with_batches_of_their_own_all_ranks_together_take_every_sample_once(count, passes):
    seen, rounds = [], set()
    for batches in ranks(count, 10, 3, passes=passes, own=True):
        updates = list(batches.epoch(1))
        rounds.add(len(updates))
        for update in updates:
            taken = torch.cat([torch.empty(0), *(batch.targets for batch in update[1])])
            assert len(taken) <= 10
            assert sum(batch.share for batch in update[1]) == pytest.approx(1 if len(taken) else 0)
            seen += taken.tolist()
    assert sorted(seen) == list(range(count))
    assert rounds == {-(-count // 30)}


def test_a_split_by_speed_keeps_the_mean_and_every_sample():
    sides = list(ranks(100, 40, 2, passes=2))
    for batches in sides:
        batches.split_by([3.0, 1.0])
    for mine, other in zip(*(batches.epoch(0) for batches in sides), strict=True):
        batches = [*mine[1], *other[1]]
        assert sum(batch.share for batch in batches) == pytest.approx(1)
        if sum(len(batch.targets) for batch in batches) == 40:
            assert [len(batch.targets) for batch in batches] == [15, 15, 5, 5]
    whole = [batch.targets for _, (batch,) in Batches(numbered(100), 40).epoch(0)]
    parts = zip(*(batches.epoch(0) for batches in sides), strict=True)
    for one, pair in zip(whole, parts, strict=True):
        together = [passes[turn].targets for turn in range(2) for _, passes in pair]
        assert torch.equal(torch.cat(together), one)


def test_the_fewest_samples_of_a_shared_pass_are_those_of_the_last_update():
    assert Batches(numbered(49), 20, size=2).fewest == 4
    assert Batches(numbered(49), 20, size=2, passes=3).fewest == 1
    assert Batches(numbered(52), 20, size=2, own=True, team=(0, 3)).fewest == 2
    assert Batches(numbered(52), 20, size=2, own=True, team=(0, 3)).fewest_together == 6


def test_a_team_shares_the_batches_of_its_worker():
    alone = [list(batches.epoch(0)) for batches in ranks(53, 10, 2, passes=2, own=True)]
    for worker, expected in enumerate(alone):
        team = [
            Batches(numbered(53), 10, worker, 2, 2, own=True, team=(member, 3)).epoch(0)
            for member in range(3)
        ]
        for (_, whole), *parts in zip(expected, *team, strict=True):
            for turn, batch in enumerate(whole):
                mine = [passes[turn] for _, passes in parts]
                assert torch.equal(torch.cat([one.targets for one in mine]), batch.targets)
                assert sum(one.share for one in mine) == pytest.approx(batch.share)


def test_a_split_by_speed_leaves_the_slowest_two_samples():
    sides = list(ranks(20, 20, 3))
    for batches in sides:
        batches.split_by([1.0, 98.0, 1.0])
    assert [len(next(batches.epoch(0))[1][0].targets) for batches in sides] == [2, 16, 2]


@pytest.mark.parametrize(
    ("samples", "speeds", "least", "parts"),
    [
        (40, [3.0, 1.0], 0, [30, 10]),
        (10, [1.0, 1.0, 1.0], 0, [4, 3, 3]),
        (10, [100.0, 1.0], 2, [8, 2]),
        (10, [1.0, 100.0, 1.0], 2, [2, 6, 2]),
        (3, [9.0, 1.0], 2, [2, 1]),
        (1, [1.0, 9.0], 2, [0, 1]),
    ],
)
def test_parts_are_in_the_ratio_of_the_speeds(samples, speeds, least, parts):
    assert by_speed(samples, speeds, least) == parts


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(0, 4))
def test_parts_by_speed_sum_up_and_keep_the_least(samples, speeds, least):
    parts = by_speed(samples, speeds, least)
    assert sum(parts) == samples
    assert min(parts) >= min(least, samples // len(speeds))
