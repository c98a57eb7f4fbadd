"""The order of an epoch by windows: a permutation, the same for everybody, as random as its memory allows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.data.streaming.opening import windows_of
from tutti.data.streaming.spans import Spans, split_stretches
from tutti.data.streaming.windows import Windows

sizes = st.integers(1, 120)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 30), st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_each_epoch_has_every_sample_once(
    samples: int, block: int, blocks: int, seed: int, epoch: int
) -> None:
    order = Windows(samples, block, blocks).order(seed, epoch)
    assert sorted(order[:].tolist()) == list(range(samples))


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 30), st.integers(1, 8), st.data())
def test_a_slice_or_a_mask_of_the_order_is_that_of_all_of_it(
    samples: int, block: int, blocks: int, data: st.DataObject
) -> None:
    order = Windows(samples, block, blocks).order(1, 2)
    start, stop = (data.draw(st.integers(0, samples)) for _ in range(2))
    assert torch.equal(order[start:stop], order[:][start:stop])
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=samples, max_size=samples)))
    assert torch.equal(order[mask], order[:][mask])


def test_the_order_depends_on_seed_and_epoch() -> None:
    windows = Windows(500, 10, 5)
    first, again, later, other = (windows.order(*of)[:] for of in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_a_window_has_the_samples_of_its_blocks_alone() -> None:
    windows = Windows(103, 10, 3)
    order = windows.order(0, 0)
    start = 0
    for number in range(windows.count):
        blocks = order.blocks(number)
        found = order.window(number)
        assert set(found.div(10, rounding_mode="floor").tolist()) == set(blocks.tolist())
        assert torch.equal(order[start : start + len(found)], found)
        assert {order.window_of(sample) for sample in found.tolist()} == {number}
        start += len(found)


def test_windows_fit_into_half_of_the_buffer_and_have_many_blocks() -> None:
    windows = windows_of(samples=1_000_000, sample_bytes=784, buffer_bytes=4_000_000)
    assert windows.largest * 784 <= 2_000_000
    assert windows.blocks >= 32
    assert windows_of(100, 784, 10**9).count == 1


def test_spans_find_the_rows_of_positions() -> None:
    spans = Spans(np.array([3, 10, 20]), np.array([2, 1, 4]))
    rows = [3, 4, 10, 20, 21, 22, 23]
    assert spans.rows(np.arange(7)).tolist() == rows
    assert [row for low, high in spans.stretches(1, 6) for row in range(low, high)] == rows[1:6]
    assert spans.between(1, 5).rows(np.arange(4)).tolist() == rows[1:5]


def test_a_split_by_stretches_has_every_sample_in_one_part() -> None:
    kept, aside = split_stretches(samples=1003, length=10, share=0.2, seed=4)
    rows = np.concatenate([spans.rows(np.arange(len(spans))) for spans in (kept, aside)])
    assert sorted(rows.tolist()) == list(range(1003))
    assert len(aside) == 200
