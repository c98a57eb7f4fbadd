"""Low-rank approximation of a gradient matrix by one step of subspace iteration, as PowerSGD does.

    P = M Q         left factor, (rows, rank)        summed over the workers, then made orthonormal
    Q = M^T P       right factor, (columns, rank)    summed over the workers, kept for the next step
    M ~ P Q^T

Both steps are linear in M, so that the sum of the workers' factors is the factor of the sum of their
gradients: they travel by plain all-reduces.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv 1905.13727, algorithm 1.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def is_worthwhile(rows: int, columns: int, rank: int) -> bool:
    """Whether two factors of this rank have fewer numbers than the matrix."""
    return (rows + columns) * min(rank, rows, columns) < rows * columns


def first_right(columns: int, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The right factor before the first step: normally distributed numbers, the same for the same seed.

    Returns:
        A matrix of shape (columns, rank).
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(dtype)


def left_factor(matrix: Tensor, right: Tensor) -> Tensor:
    """P = M Q; of shape (rows, rank)."""
    return matrix @ right


def orthonormal(left: Tensor) -> Tensor:
    """An orthonormal basis of the columns of `left`, of the same shape.

    By Householder reflections, where the paper has Gram-Schmidt: they stay orthonormal where the columns are
    dependent, as those of a zero gradient are.
    """
    basis, _ = torch.linalg.qr(left)
    return cast(Tensor, basis)


def right_factor(matrix: Tensor, left: Tensor) -> Tensor:
    """Q = M^T P; of shape (columns, rank)."""
    return matrix.T @ left


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Overwrite `out`, of shape (rows, columns), with the approximation P Q^T."""
    torch.mm(left, right.T, out=out)
