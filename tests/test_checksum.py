"""The checksum of tensors."""

from __future__ import annotations

import pytest
import torch

from tutti.checksum import STRETCH, checksum


def flip(values: torch.Tensor, bit: int) -> None:
    content = values.view(-1).view(torch.uint8).numpy()
    content[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_each_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.zeros(5, dtype=dtype)
    clean = checksum(values)
    for bit in range(8 * values.nbytes):
        flip(values, bit)
        assert checksum(values) != clean
        flip(values, bit)
    assert checksum(values) == clean


def test_a_checksum_is_of_the_content_and_of_its_order() -> None:
    values = torch.arange(2.0 * 8 * STRETCH + 3)
    assert checksum(values) == checksum(values.reshape(-1, 1).clone())
    other = values.clone()
    other[[0, 2]] = other[[2, 0]]
    assert checksum(other) != checksum(values)
    assert checksum(torch.empty(0)) == checksum(torch.empty(0)) != checksum(torch.zeros(1))
