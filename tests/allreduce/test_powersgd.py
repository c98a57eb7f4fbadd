"""PowerSGD's two steps against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.allreduce.powersgd import first_right, is_worthwhile, orthonormal


def approximation(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """One step: the approximation, and the right factor that the next step begins with."""
    left = orthonormal(matrix @ right)
    right = matrix.T @ left
    return left @ right.T, right


def test_one_step_by_hand() -> None:
    # M = [[3, 0], [4, 5]], Q = (1, 0): P = (3, 4) -> (0.6, 0.8); Q = M^T P = (5, 4); P Q^T
    matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
    found, right = approximation(matrix, torch.tensor([[1.0], [0.0]]))
    sign = torch.sign(right[0, 0])  # a basis may point either way
    assert (sign * right).view(-1).tolist() == pytest.approx([5.0, 4.0])
    assert found.tolist() == [pytest.approx([3.0, 2.4]), pytest.approx([4.0, 3.2])]


def test_a_matrix_of_that_rank_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).double() for shape in ((9, 2), (2, 7)))
    found, _ = approximation(left @ right, first_right(7, 2, torch.float64, seed=1))
    assert torch.allclose(found, left @ right, rtol=0, atol=1e-12)


def test_steps_from_the_last_factor_come_to_the_best_approximation() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(9, 7, generator=generator, dtype=torch.float64)
    right = first_right(7, 2, torch.float64, seed=1)
    losses = []
    for _ in range(200):
        found, right = approximation(matrix, right)
        losses.append(float((matrix - found).norm()))
    best = torch.linalg.svdvals(matrix)[2:].norm()
    assert losses[0] > 1.01 * best
    assert losses[-1] == pytest.approx(float(best), rel=1e-12)


def test_a_zero_gradient_does_not_stop_what_follows() -> None:
    matrix = torch.ones(5, 4, dtype=torch.float64)
    found, right = approximation(torch.zeros_like(matrix), first_right(4, 1, torch.float64, seed=0))
    assert not found.any()
    for _ in range(3):
        found, right = approximation(matrix, right)
    assert torch.allclose(found, matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "worth"),
    [(100, 50, 2, True), (3, 3, 2, False), (6, 3, 2, False), (10, 1, 1, False), (4, 4, 9, False)],
)
def test_factors_are_worthwhile_when_they_are_smaller(
    rows: int, columns: int, rank: int, worth: bool
) -> None:
    assert is_worthwhile(rows, columns, rank) is worth
