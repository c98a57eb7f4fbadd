"""The figures of a shuffle: 1 for a full one, and what theory says for sorted samples."""

from __future__ import annotations

import pytest
import torch

from tutti.data.streaming.quality import quality_of
from tutti.data.streaming.windows import Windows

SAMPLES = 40_000


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_samples_without_order_are_shuffled_as_well_as_can_be(kind: torch.dtype) -> None:
    targets = torch.randint(0, 10, (SAMPLES,), generator=torch.Generator().manual_seed(0)).to(kind)
    found = quality_of(Windows(SAMPLES, 50, 32), targets, batch_size=50, seed=0)
    # The mean of 200 batches, of a ratio whose deviation is at most 2 ** 0.5.
    assert found.spread == pytest.approx(1, abs=0.3)
    assert found.share == pytest.approx(32 * 50 / SAMPLES)


def test_sorted_samples_vary_as_theory_says() -> None:
    targets = torch.arange(SAMPLES) * 10 // SAMPLES
    found = quality_of(Windows(SAMPLES, 50, 32), targets, batch_size=50, seed=0)
    assert found.sorted_spread == pytest.approx(1 + 49 / 32 * (800 - 32) / 799)
    # 25 windows, of which each has a share of its own: their variance is known to a third.
    assert found.spread == pytest.approx(found.sorted_spread, rel=0.35)


def test_a_window_of_all_samples_is_a_full_shuffle() -> None:
    targets = torch.arange(1000) * 10 // 1000
    found = quality_of(Windows(1000, 10, 100), targets, batch_size=50, seed=0)
    assert found.sorted_spread == 1
    assert found.share == 1
