"""The closed forms of goodput against runs in which hosts fail at random."""

from __future__ import annotations

import math

import numpy
import pytest

from tutti.strategies.base import Pace
from tutti.studies.simulate.failures import HOUR_S, Failures, goodput

FAILURES = Failures(hours_between=4.0, repair_s=900.0, checkpoint_every_s=300.0, restart_s=60.0)


def until_kept(failures: Failures, hosts: int, segments: int) -> float:
    """Return the share of useful time of synchronous workers, checkpoint by checkpoint."""
    generator = numpy.random.default_rng(1)
    scale = failures.hours_between * HOUR_S / hosts
    passed = 0.0
    for _ in range(segments):
        needed = failures.checkpoint_every_s
        while (failure := generator.exponential(scale)) < needed:
            passed += failure
            needed = failures.checkpoint_every_s + failures.restart_s
        passed += needed
    return segments * failures.checkpoint_every_s / passed


def until_repaired(failures: Failures, cycles: int) -> float:
    """Return the share of useful time of a worker that stops alone."""
    up = numpy.random.default_rng(2).exponential(failures.hours_between * HOUR_S, cycles).sum()
    return float(up / (up + cycles * (failures.repair_s + failures.restart_s)))


def test_a_failure_costs_synchronous_workers_part_of_a_period_and_the_restart() -> None:
    found = goodput(FAILURES, Pace.TOGETHER, hosts=16, servers=0)
    assert found == pytest.approx(until_kept(FAILURES, 16, 20_000), rel=0.02)
    assert goodput(FAILURES, Pace.ABREAST, hosts=16, servers=0) == found
    # Young's first order: half a period and the restart for each failure.
    rare = Failures(1e4, 900.0, 300.0, 60.0)
    lost = (300.0 / 2 + 60.0) / (1e4 * HOUR_S / 16)
    assert 1 - goodput(rare, Pace.TOGETHER, 16, 0) == pytest.approx(lost, rel=0.01)


def test_a_failure_costs_free_workers_one_host_until_its_repair() -> None:
    alone = goodput(FAILURES, Pace.FREE, hosts=64, servers=0)
    assert alone == pytest.approx(until_repaired(FAILURES, 50_000), rel=0.01)
    of_servers = goodput(FAILURES, Pace.TOGETHER, hosts=2, servers=0)
    assert goodput(FAILURES, Pace.FREE, hosts=64, servers=2) == pytest.approx(alone * of_servers)


def test_no_step_is_useful_if_no_checkpoint_is_ever_reached() -> None:
    assert goodput(Failures(1.0, 0.0, math.inf, 0.0), Pace.TOGETHER, 8, 0) == 0.0


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, 1.0), (1.0, 1.0, 0.0, 1.0)])
def test_impossible_failures_are_refused(bad: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Failures(*bad)
