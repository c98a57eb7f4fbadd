"""Every sample is taken once in each epoch, in an order that no number of ranks changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.data import Batches, Part
from tutti.errors import BadOption


def numbered(count: int) -> Part:
    """A part whose inputs and targets are the samples' own numbers."""
    return Part(torch.arange(count, dtype=torch.float32)[:, None], torch.arange(count))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    size = draw(st.integers(1, 7))
    return draw(st.integers(1, 200)), draw(st.integers(size, 150)), size, draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(cuts(), st.integers(0, 5))
def test_all_ranks_together_take_every_sample_once(cut, epoch):
    count, batch_size, size, passes = cut
    seen = []
    for rank in range(size):
        batches = Batches(numbered(count), batch_size, rank, size, passes)
        for _, taken in batches.epoch(epoch):
            for batch in taken:
                assert torch.equal(batch.inputs[:, 0].long(), batch.targets)
                seen += batch.targets.tolist()
    assert sorted(seen) == list(range(count))


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_shares_of_all_ranks_and_passes_sum_to_one(cut):
    count, batch_size, size, passes = cut
    ranks = [Batches(numbered(count), batch_size, r, size, passes) for r in range(size)]
    for k, updates in enumerate(zip(*(rank.epoch(0) for rank in ranks), strict=True)):
        samples = min(batch_size, count - k * batch_size)
        assert ranks[0].samples(k + 1) == k * batch_size + samples
        batches = [batch for _, taken in updates for batch in taken]
        assert all(batch.share == len(batch.targets) / samples for batch in batches)
        assert sum(batch.share for batch in batches) == pytest.approx(1)


@settings(max_examples=100, deadline=None)
@given(cuts(), st.integers(0, 1000))
def test_an_update_has_the_same_samples_in_the_same_order_on_any_number_of_ranks(cut, seed):
    count, batch_size, size, passes = cut
    alone = [batch.targets for _, (batch,) in Batches(numbered(count), batch_size, seed=seed).epoch(1)]
    ranks = [
        list(Batches(numbered(count), batch_size, rank, size, passes, seed=seed).epoch(1))
        for rank in range(size)
    ]
    assert len(alone) == Batches(numbered(count), batch_size).updates
    for k, whole in enumerate(alone):
        together = [ranks[rank][k][1][p].targets for p in range(passes) for rank in range(size)]
        assert torch.equal(torch.cat(together), whole)


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    batches = Batches(numbered(50), 8, seed=3)
    assert torch.equal(batches.order(2), Batches(numbered(50), 20, 1, 4, 2, seed=3).order(2))
    others = [
        batches.order(3),
        Batches(numbered(50), 8, seed=4).order(2),
        Batches(numbered(50), 8, seed=2).order(3),
    ]
    assert not any(torch.equal(batches.order(2), other) for other in others)


def test_a_rank_without_samples_gets_an_empty_batch_of_the_right_shape():
    *_, (number, (empty,)) = Batches(numbered(9), 4, rank=2, size=4).epoch(0)
    assert number == 2
    assert empty.inputs.shape == (0, 1)
    assert empty.targets.shape == (0,)
    assert empty.share == 0.0


def test_a_batch_with_fewer_samples_than_ranks_is_refused():
    with pytest.raises(BadOption, match=r"a batch of 2 samples cannot be split over 3 ranks.*--batch-size 3"):
        Batches(numbered(10), 2, size=3)
    with pytest.raises(BadOption, match="a batch of 0 samples cannot be split over 1 rank;"):
        Batches(numbered(10), 0)
    with pytest.raises(BadOption, match="a batch of 1 sample cannot be split over 2 ranks"):
        Batches(numbered(10), 1, size=2)


def test_an_epoch_can_be_cut_short():
    batches = Batches(numbered(45), 10)
    assert [number for number, _ in batches.epoch(2, stop=2)] == [10, 11]
    assert [number for number, _ in batches.epoch(2, stop=9)] == [10, 11, 12, 13, 14]


def test_an_order_that_was_prepared_is_taken_and_not_drawn_again(monkeypatch):
    batches = Batches(numbered(45), 45)
    batches.prepare(1)
    drawn = batches.order(1)
    monkeypatch.setattr(batches, "order", lambda _: pytest.fail("it is drawn again"))
    batches.prepare(1)
    ((_, (batch,)),) = batches.epoch(1)
    assert torch.equal(batch.targets, drawn)
