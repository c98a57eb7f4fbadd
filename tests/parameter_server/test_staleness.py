"""Remedies for stale gradients, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.parameter_server.base import Push
from tutti.parameter_server.staleness import Damping, compensate, compensate_adaptively


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1.0), (1, 1.0), (2, 0.5), (8, 0.125)])
def test_a_gradient_counts_less_the_later_it_comes(staleness: int, factor: float) -> None:
    assert Damping().rate(Push(0, (), (), None, staleness=staleness)) == factor


def test_the_gradient_is_extrapolated_along_the_weights_way() -> None:
    # 3 + 0.1 * 3 * 3 * (7 - 5) = 4.8
    gradient = scalar(3.0)
    compensate(gradient, now=scalar(7.0), then=scalar(5.0), strength=0.1)
    assert gradient.item() == pytest.approx(4.8)


def test_without_a_way_nothing_is_changed() -> None:
    gradient = scalar(3.0)
    compensate(gradient, now=scalar(5.0), then=scalar(5.0), strength=0.1)
    assert gradient.item() == 3.0


def test_the_adaptive_strength_follows_the_running_mean_of_squares() -> None:
    # s = 0.75 * 4 + 0.25 * 9 = 5.25; 3 + 2 / sqrt(5.25) * 9 * 2
    gradient, mean_square = scalar(3.0), scalar(4.0)
    compensate_adaptively(gradient, mean_square, scalar(7.0), scalar(5.0), strength=2.0, decay=0.75)
    assert mean_square.item() == pytest.approx(5.25)
    assert gradient.item() == pytest.approx(3 + 36 / math.sqrt(5.25), rel=1e-6)


def test_the_adaptive_strength_is_bounded_where_gradients_are_small() -> None:
    # s = 0.5 * 0 + 0.5 * 1e-6; 1e-3 + 2 / sqrt(s + 1e-7) * 1e-6 * 2
    gradient, mean_square = scalar(1e-3), scalar(0.0)
    compensate_adaptively(gradient, mean_square, scalar(7.0), scalar(5.0), strength=2.0, decay=0.5)
    assert gradient.item() == pytest.approx(1e-3 + 4e-6 / math.sqrt(6e-7), rel=1e-12)
    gradient, mean_square = scalar(0.0), scalar(0.0)
    compensate_adaptively(gradient, mean_square, scalar(7.0), scalar(5.0), strength=2.0, decay=0.5)
    assert gradient.item() == 0.0
