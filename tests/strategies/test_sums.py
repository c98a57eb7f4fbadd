"""The sum of weighted gradients is the mean over the samples."""

from __future__ import annotations

import torch

from tutti.strategies.sync import add_up


def test_the_mean_over_the_samples_by_hand() -> None:
    # Worker 0 has samples with gradients 1 and 3, worker 1 has 8: shares 2/3 and 1/3, mean 4.
    total, other = torch.tensor([2 / 3 * 2.0]), torch.tensor([1 / 3 * 8.0])
    add_up(total, [other])
    assert torch.allclose(total, torch.tensor([4.0]))
    assert other.tolist() == [0.0]


def test_gradients_are_added_in_their_order() -> None:
    total = torch.tensor([1.0])
    add_up(total, [torch.tensor([1e8]), torch.tensor([-1e8])])
    assert total.tolist() == [0.0]  # 1 is lost in 1e8
