"""Distributions of the time of a forward and backward pass."""

from __future__ import annotations

import numpy
import pytest

from tutti.studies.simulate.step_times import StepTimes


def test_samples_follow_the_quantiles() -> None:
    times = StepTimes((1.0, 2.0, 6.0))
    drawn = times.sample(numpy.random.default_rng(0), (200, 200))
    assert drawn.shape == (200, 200)
    assert numpy.quantile(drawn, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([1, 1.5, 2, 4, 6], rel=0.02)
    assert times.median == 2.0
    assert StepTimes((1.0, 3.0)).scaled(2.0) == StepTimes((2.0, 6.0))


def test_measured_times_keep_their_extremes_and_median() -> None:
    samples = numpy.random.default_rng(0).gamma(5.0, size=5000).tolist()
    times = StepTimes.measured(samples)
    assert len(times.quantiles_s) == 101
    assert (times.quantiles_s[0], times.quantiles_s[-1]) == (min(samples), max(samples))
    assert times.median == pytest.approx(numpy.median(samples))
    assert StepTimes.measured([3.0]) == StepTimes((3.0, 3.0))


@pytest.mark.parametrize("values", [(), (1.0,), (2.0, 1.0), (-1.0, 1.0), (1.0, float("inf"))])
def test_impossible_quantiles_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected at least 2 rising"):
        StepTimes(values)
