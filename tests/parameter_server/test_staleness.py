"""Remedies for stale gradients, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.parameter_server.base import Push, Slot
from tutti.parameter_server.staleness import Compensation, Damping, Remedy


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def correct(remedy: Remedy, gradient: torch.Tensor, now: float, then: float, **memory: torch.Tensor) -> None:
    """Apply a remedy to a gradient, with what it remembers, if anything, in `memory`."""
    weights = scalar(now)
    remedy.open([weights], [Slot(0, (slice(0, 1),))], lambda *_: memory["mean_square"])
    remedy.apply(Push(0, (weights,), (gradient,), None, then=(scalar(then),)))


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1.0), (1, 1.0), (2, 0.5), (8, 0.125)])
def test_a_gradient_counts_less_the_later_it_comes(staleness: int, factor: float) -> None:
    assert Damping().rate(Push(0, (), (), None, staleness=staleness)) == factor


def test_the_gradient_is_extrapolated_along_the_weights_way() -> None:
    # 3 + 0.1 * 3 * 3 * (7 - 5) = 4.8
    gradient = scalar(3.0)
    correct(Compensation(0.1), gradient, now=7.0, then=5.0)
    assert gradient.item() == pytest.approx(4.8)


def test_without_a_way_nothing_is_changed() -> None:
    gradient = scalar(3.0)
    correct(Compensation(0.1), gradient, now=5.0, then=5.0)
    assert gradient.item() == 3.0


def test_the_adaptive_strength_follows_the_running_mean_of_squares() -> None:
    # s = 0.75 * 4 + 0.25 * 9 = 5.25; 3 + 2 / sqrt(5.25) * 9 * 2
    gradient, mean_square = scalar(3.0), scalar(4.0)
    correct(Compensation(2.0, 0.75), gradient, 7.0, 5.0, mean_square=mean_square)
    assert mean_square.item() == pytest.approx(5.25)
    assert gradient.item() == pytest.approx(3 + 36 / math.sqrt(5.25), rel=1e-6)


def test_the_adaptive_strength_is_bounded_where_gradients_are_small() -> None:
    # s = 0.5 * 0 + 0.5 * 1e-6; 1e-3 + 2 / sqrt(s + 1e-7) * 1e-6 * 2
    gradient, mean_square = scalar(1e-3), scalar(0.0)
    correct(Compensation(2.0, 0.5), gradient, 7.0, 5.0, mean_square=mean_square)
    assert gradient.item() == pytest.approx(1e-3 + 4e-6 / math.sqrt(6e-7), rel=1e-12)
    gradient, mean_square = scalar(0.0), scalar(0.0)
    correct(Compensation(2.0, 0.5), gradient, 7.0, 5.0, mean_square=mean_square)
    assert gradient.item() == 0.0
