"""Averages of weights, in numbers worked by hand; and the graphs that say who averages with whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.strategies.averaged import mean
from tutti.strategies.gossip import GRAPHS, links


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_added_up_in_float32(dtype: torch.dtype) -> None:
    big = 256.0 if dtype is torch.bfloat16 else 40000.0
    out = torch.zeros(1, dtype=dtype)
    mean(out, [torch.tensor([value], dtype=dtype) for value in (big, 1.0, 1.0, big)])
    exact = sum(float(torch.tensor(value, dtype=dtype)) for value in (big, 1.0, 1.0, big)) / 4
    assert out.item() == torch.tensor(exact, dtype=dtype).item()


def matrix(graph: str, size: int, step: int) -> Tensor:
    """W: row i holds the weights with which rank i averages."""
    found = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        pairs = links(graph, rank, size, step)
        for source in [rank, *(source for _, source in pairs)]:
            found[rank, source] += 1 / (1 + len(pairs))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_mixing_matrix_is_doubly_stochastic_and_reaches_everyone(graph: str, size: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for step in range(4 * size):
        mixing = matrix(graph, size, step)
        assert torch.allclose(mixing.sum(0), torch.ones(size, dtype=torch.float64))
        assert torch.allclose(mixing.sum(1), torch.ones(size, dtype=torch.float64))
        product = mixing @ product
    assert (product > 0).all()
