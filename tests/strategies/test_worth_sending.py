"""Which gradients are worth sending, in numbers worked by hand."""

from __future__ import annotations

import pytest

from tutti.strategies.lazy import is_worth_sending


@pytest.mark.parametrize(("change", "sends"), [(0.49, False), (0.5, False), (0.51, True)])
def test_a_gradient_is_sent_when_it_has_changed_more_than_the_weights_suggest(
    change: float, sends: bool
) -> None:
    # 0.1 * (0.03 + 0.02) / (0.05 * 2)^2 = 0.5
    assert is_worth_sending(change, [0.03, 0.02], threshold=0.1, lr=0.05, workers=2) is sends


def test_without_a_threshold_every_change_is_sent() -> None:
    assert is_worth_sending(1e-30, [1.0], threshold=0.0, lr=0.1, workers=4)


def test_weights_that_have_not_moved_yet_allow_no_change() -> None:
    assert is_worth_sending(1e-30, [], threshold=1.0, lr=0.1, workers=4)
    assert not is_worth_sending(0.0, [], threshold=1.0, lr=0.1, workers=4)


def test_at_a_rate_of_0_no_gradient_is_worth_sending() -> None:
    assert not is_worth_sending(7.0, [], threshold=1.0, lr=0.0, workers=4)
    assert not is_worth_sending(7.0, [0.1], threshold=1.0, lr=0.0, workers=4)
