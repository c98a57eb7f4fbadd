"""Adasum against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from tutti.allreduce.adasum import combine


def adasum(first: list[float], second: list[float], dtype: torch.dtype = torch.float32) -> list[float]:
    a, b = torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype)
    combine(a, b, [slice(0, len(a))])
    assert torch.equal(b, torch.tensor(second, dtype=dtype))
    return a.tolist()


def test_the_equation_by_hand() -> None:
    # a.b = 2, |a|^2 = 1, |b|^2 = 8: (1 - 2/2) a + (1 - 2/16) b
    assert adasum([1.0, 0.0], [2.0, 2.0]) == [1.75, 1.75]


def test_orthogonal_gradients_are_added() -> None:
    assert adasum([3.0, 0.0], [0.0, 4.0]) == [3.0, 4.0]


def test_equal_gradients_are_averaged() -> None:
    assert adasum([3.0, 4.0], [3.0, 4.0]) == [3.0, 4.0]


@pytest.mark.parametrize("other", [[0.0, 0.0], [3.0, -1.0]])
def test_a_zero_gradient_changes_nothing(other: list[float]) -> None:
    assert adasum([0.0, 0.0], other) == other
    assert adasum(other, [0.0, 0.0]) == other


def test_each_layer_is_combined_by_itself() -> None:
    a, b = torch.tensor([1.0, 0.0, 9.0, 5.0]), torch.tensor([2.0, 2.0, 9.0, 5.0])
    combine(a, b, [slice(0, 2), slice(3, 4)])
    assert a.tolist() == [1.75, 1.75, 9.0, 5.0]  # what belongs to no layer stays


@pytest.mark.parametrize(
    ("large", "small", "dtype"),
    [
        (1.0, 1e-40, torch.float32),
        (2.0**100, 2.0**-100, torch.float32),
        (1.0, 1e-200, torch.float64),
        (1e200, 1e-200, torch.float64),
    ],
)
def test_neither_large_nor_small_gradients_leave_the_range(
    large: float, small: float, dtype: torch.dtype
) -> None:
    assert adasum([large, 0.0], [small, 0.0], dtype) == pytest.approx([large / 2, 0.0], rel=1e-14)
    assert adasum([small, 0.0], [large, 0.0], dtype) == pytest.approx([large / 2, 0.0], rel=1e-14)
    assert adasum([large, 0.0], [large, 0.0], dtype) == pytest.approx([large, 0.0], rel=1e-14)
