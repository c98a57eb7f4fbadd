"""Gradient energy matching, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.strategies.gem import match_energy


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def matched(update: float, moment: float, moved: float, **options: float) -> tuple[float, float]:
    """The update and the moment afterwards, when the centre has moved by `moved`."""
    vectors = scalar(update), scalar(moment)
    match_energy(*vectors, scalar(1.0 + moved), scalar(1.0), **{"momentum": 0.9, **options})
    return vectors[0].item(), vectors[1].item()


def test_an_update_gets_the_room_that_others_left() -> None:
    # m = 0.9 * (-1) - 0.5 = -1.4; pi = (1.4 - 0.4) / 0.5 = 2; dw = 2 * (-0.5)
    update, moment = matched(-0.5, -1.0, moved=0.4)
    assert moment == pytest.approx(-1.4)
    assert update == pytest.approx(-1.0)


def test_the_energies_match_when_all_move_the_same_way() -> None:
    update, moment = matched(-0.5, -1.0, moved=-0.4)
    assert -0.4 + update == pytest.approx(moment)


def test_amplification_makes_more_room() -> None:
    # pi = (1.5 * 1.4 - 0.4) / 0.5 = 3.4
    assert matched(-0.5, -1.0, moved=0.4, amplification=1.5)[0] == pytest.approx(-1.7)


def test_an_update_without_room_is_left_out() -> None:
    assert matched(-0.5, -1.0, moved=3.0)[0] == 0.0


def test_without_limits_it_is_turned_round() -> None:
    # pi = (1.4 - 3) / 0.5 = -3.2
    free = {"least": -math.inf, "most": math.inf}
    assert matched(-0.5, -1.0, moved=3.0, **free)[0] == pytest.approx(1.6)


def test_a_tiny_update_is_scaled_by_the_limit_at_the_most() -> None:
    assert matched(1e-6, 1.0, moved=0.0)[0] == pytest.approx(5e-6)


def test_no_update_stays_none() -> None:
    assert matched(0.0, 1.0, moved=0.0, most=math.inf)[0] == 0.0


def test_an_update_as_small_as_epsilon_is_halved() -> None:
    # m = 1e-16; pi = 1e-16 / (1e-16 + 1e-16)
    assert matched(1e-16, 0.0, moved=0.0)[0] == pytest.approx(5e-17, rel=1e-12)
