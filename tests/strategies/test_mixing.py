"""Averages of weights, in numbers worked by hand; and the graphs that say who averages with whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.strategies.adpsgd import half_way
from tutti.strategies.averaged import mean
from tutti.strategies.diloco import move_outer
from tutti.strategies.gossip import GRAPHS, links


def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("values", "expected"), [([3.0], 3.0), ([1.0, 4.0], 2.5), ([1.0, 4.0, -2.0], 1.0)])
def test_the_mean(values: list[float], expected: float, dtype: torch.dtype) -> None:
    vectors, out = [scalar(value).to(dtype) for value in values], scalar(9.0).to(dtype)
    mean(out, vectors)
    assert out.item() == expected
    assert [vector.item() for vector in vectors] == values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_added_up_in_float32(dtype: torch.dtype) -> None:
    big = 256.0 if dtype is torch.bfloat16 else 40000.0
    out = torch.zeros(1, dtype=dtype)
    mean(out, [torch.tensor([value], dtype=dtype) for value in (big, 1.0, 1.0, big)])
    exact = sum(float(torch.tensor(value, dtype=dtype)) for value in (big, 1.0, 1.0, big)) / 4
    assert out.item() == torch.tensor(exact, dtype=dtype).item()


def test_the_outer_step() -> None:
    # d = 10 - 8 = 2; v = 0.5 * 4 + 2 = 4; anchor = 10 - 0.25 * (2 + 0.5 * 4) = 9
    anchor, average, velocity = scalar(10.0), scalar(8.0), scalar(4.0)
    move_outer(anchor, average, velocity, lr=0.25, momentum=0.5)
    assert (anchor.item(), velocity.item()) == (9.0, 4.0)


def test_the_outer_step_is_torchs_nesterov() -> None:
    anchor, velocity = scalar(1.0), scalar(0.0)
    other = torch.nn.Parameter(scalar(1.0))
    plain = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for average in (0.5, 0.7, -1.0):
        other.grad = other.detach() - average
        plain.step()
        move_outer(anchor, scalar(average), velocity, 0.7, 0.9)
        assert anchor.item() == pytest.approx(other.item())


def test_half_way_keeps_the_sum() -> None:
    # d = (9 - 1) / 2 = 4
    mine, theirs = scalar(1.0), scalar(9.0)
    half_way(mine, theirs)
    assert (mine.item(), theirs.item()) == (1.0, 4.0)


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


@pytest.mark.parametrize("size", [2, 3, 6, 7])
@pytest.mark.parametrize("graph", GRAPHS)
def test_who_sends_to_a_rank_is_who_it_gets_from_in_the_same_turn(graph: str, size: int) -> None:
    for step in range(size):
        for rank in range(size):
            for turn, (to, source) in enumerate(links(graph, rank, size, step)):
                assert links(graph, to, size, step)[turn][1] == rank
                assert links(graph, source, size, step)[turn][0] == rank
                assert rank not in (to, source)


def test_the_neighbours_of_each_graph() -> None:
    assert links("ring", 0, 5, 0) == [(1, 4), (4, 1)]
    assert links("ring", 0, 3, 0) == [(1, 2), (2, 1)]
    assert links("ring", 0, 2, 0) == [(1, 1)]
    assert links("exponential", 0, 8, 0) == [(1, 7), (2, 6), (4, 4)]
    assert links("all", 1, 3, 0) == [(2, 0), (0, 2)]
    assert links("all", 0, 4, 0) == [(1, 3), (2, 2), (3, 1)]
    assert [links("shift_one", 0, 4, step) for step in range(3)] == [[(2, 2)], [(3, 3)], [(2, 2)]]
