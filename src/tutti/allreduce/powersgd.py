"""Sums of gradient matrices as products of two thin factors, by one step of subspace iteration: PowerSGD.

    P = M Q         left factor, (rows, rank)        summed over the workers, then made orthonormal
    Q = M^T P       right factor, (columns, rank)    summed over the workers, kept for the next step
    M ~ P Q^T

Both steps are linear in M, so that the sum of the workers' factors is the factor of the sum of their
gradients: they travel by plain all-reduces.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv 1905.13727, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction, Layer
from tutti.allreduce.exact import all_reduce_bytes
from tutti.comm.base import Communicator
from tutti.replica import is_finite
from tutti.state import Values


def is_worthwhile(rows: int, columns: int, rank: int) -> bool:
    """Return whether two factors of this rank have fewer numbers than the matrix."""
    return (rows + columns) * min(rank, rows, columns) < rows * columns


def first_right(columns: int, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return the right factor before the first step, (columns, rank): normal numbers drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(dtype)


def orthonormal(left: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of `left`, of the same shape.

    By Householder reflections, where the paper has Gram-Schmidt: they stay orthonormal where the columns are
    dependent, as in a zero gradient.
    """
    basis, _ = torch.linalg.qr(left)
    return cast(Tensor, basis)


@dataclass
class _Matrix:
    """A layer's gradient with its error as a matrix, and its factors, which lie in the two messages."""

    place: slice
    wanted: Tensor
    left: Tensor
    right: Tensor


class PowerSGD(GradientReduction):
    """Sums of gradient matrices by their factors, in two all-reduces; the rest is sent as it is.

        message 1   all left factors, and the layers that are no matrix or too small to gain from this
        message 2   all right factors, from which the next step begins (warm start)

    Error feedback as in `tutti.allreduce.compression.with_feedback` (Vogels et al. 2019, algorithm 2). A
    parameter of more than two dimensions is a matrix of its first dimension by all others. A gradient that is
    not finite makes the whole sum NaN, and leaves errors and factors as they were.

    Both factors are formed in every step, as in the paper, and from the first step on. The authors' program
    (epfml/powersgd) forms them in alternate steps, and leaves the first 100 steps uncompressed.
    """

    def __init__(self, comm: Communicator, layout: GradientLayout, rank: int) -> None:
        self._comm = comm
        self._error, self._wanted = (torch.zeros(layout.length, dtype=layout.wide) for _ in range(2))
        chosen = [layer for layer in layout.layers if _is_matrix(layer, rank)]
        self._rest = [layer.place for layer in layout.layers if not _is_matrix(layer, rank)]
        sizes = [_factors(layer, rank) for layer in chosen]
        plain = sum(place.stop - place.start for place in self._rest)
        self._lefts = torch.zeros(sum(rows * thin for rows, _, thin in sizes) + plain, dtype=layout.wide)
        self._rights = torch.zeros(sum(columns * thin for _, columns, thin in sizes), dtype=layout.wide)
        *lefts, self._plain = torch.split(self._lefts, [*(rows * thin for rows, _, thin in sizes), plain])
        rights = torch.split(self._rights, [columns * thin for _, columns, thin in sizes])
        self._matrices = [
            _Matrix(
                layer.place,
                self._wanted[layer.place].view(rows, columns),
                left.view(rows, thin),
                right.view(columns, thin),
            )
            for layer, (rows, columns, thin), left, right in zip(chosen, sizes, lefts, rights, strict=True)
        ]
        for number, matrix in enumerate(self._matrices):
            columns, thin = matrix.right.shape
            matrix.right.copy_(first_right(columns, thin, self._error.dtype, seed=number))

    @override
    def state(self) -> Values:
        return {"error": self._error, "rights": self._rights}

    @override
    def load_state(self, values: Values) -> None:
        self._error.copy_(values["error"])
        self._rights.copy_(values["rights"])

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        torch.add(self._error, vector, out=self._wanted)
        for matrix in self._matrices:
            torch.mm(matrix.wanted, matrix.right, out=matrix.left)
        if self._rest:
            torch.cat([self._wanted[place] for place in self._rest], out=self._plain)
        self._comm.all_reduce(self._lefts)
        if not is_finite(self._lefts):
            vector.fill_(math.nan)
            return all_reduce_bytes(self._lefts.nbytes, self._comm.size)
        for matrix in self._matrices:
            matrix.left.copy_(orthonormal(matrix.left))
            torch.mm(matrix.wanted.T, matrix.left, out=matrix.right)
            matrix.wanted.addmm_(matrix.left, matrix.right.T, alpha=-1)
        if self._matrices:
            self._comm.all_reduce(self._rights)
        self._write(vector)
        self._error.copy_(self._wanted)
        return all_reduce_bytes(self._lefts.nbytes + self._rights.nbytes, self._comm.size)

    def _write(self, vector: Tensor) -> None:
        """Overwrite the vector with the decompressed sum."""
        total = vector if vector.dtype == self._error.dtype else torch.zeros_like(self._error)
        for matrix in self._matrices:
            torch.mm(matrix.left, matrix.right.T, out=total[matrix.place].view(matrix.wanted.shape))
        lengths = [place.stop - place.start for place in self._rest]
        for place, plain in zip(self._rest, torch.split(self._plain, lengths), strict=True):
            total[place] = plain
            self._wanted[place] = 0
        if total is not vector:
            vector.copy_(total)


def _factors(layer: Layer, rank: int) -> tuple[int, int, int]:
    """Return a layer's rows and columns, and the rank of its factors."""
    rows, columns = layer.shape[0], math.prod(layer.shape[1:])
    return rows, columns, min(rank, rows, columns)


def _is_matrix(layer: Layer, rank: int) -> bool:
    """Return whether the layer has two dimensions or more and gains from factors of this rank."""
    return len(layer.shape) > 1 and is_worthwhile(*_factors(layer, rank))
