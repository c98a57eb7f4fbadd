"""Adasum against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from tutti.allreduce.adasum import coefficients, combine


def adasum(first: list[float], second: list[float]) -> list[float]:
    a, b = torch.tensor(first), torch.tensor(second)
    combine(a, b, [slice(0, len(a))])
    assert b.tolist() == second
    return a.tolist()


def test_the_equation_by_hand() -> None:
    # a.b = 2, |a|^2 = 1, |b|^2 = 8: (1 - 2/2) a + (1 - 2/16) b
    assert coefficients(2.0, 1.0, 8.0) == (0.0, 0.875)
    assert adasum([1.0, 0.0], [2.0, 2.0]) == [1.75, 1.75]


def test_a_gradient_that_is_zero_has_the_coefficient_one() -> None:
    assert coefficients(0.0, 0.0, 4.0) == (1.0, 1.0)
    assert coefficients(0.0, 4.0, 0.0) == (1.0, 1.0)


def test_orthogonal_gradients_are_added() -> None:
    assert adasum([3.0, 0.0], [0.0, 4.0]) == [3.0, 4.0]


def test_equal_gradients_are_averaged() -> None:
    assert adasum([3.0, 4.0], [3.0, 4.0]) == [3.0, 4.0]


def test_parallel_gradients_give_their_mean() -> None:
    # a = g, b = 3 g: (1 - 3/2) g + (1 - 3/18) 3 g = 2 g
    assert adasum([1.0, 0.0], [3.0, 0.0]) == [2.0, 0.0]


@pytest.mark.parametrize("other", [[0.0, 0.0], [3.0, -1.0]])
def test_a_zero_gradient_changes_nothing(other: list[float]) -> None:
    assert adasum([0.0, 0.0], other) == other
    assert adasum(other, [0.0, 0.0]) == other


def test_each_layer_is_combined_by_itself() -> None:
    a, b = torch.tensor([1.0, 0.0, 9.0, 5.0]), torch.tensor([2.0, 2.0, 9.0, 5.0])
    combine(a, b, [slice(0, 2), slice(3, 4)])
    assert a.tolist() == [1.75, 1.75, 9.0, 5.0]  # what belongs to no layer stays


def test_squares_beyond_float32_are_no_trouble() -> None:
    assert adasum([2.0**100, 0.0], [2.0**100, 0.0]) == [2.0**100, 0.0]
