"""Which candidate wins, which ones stop early and how long it takes: with a clock and speeds made up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tutti.errors import BadModel
from tutti.studies.autotune.race import (
    FEW,
    LONGEST_S,
    MOST_ROUNDS,
    Contender,
    Fate,
    Timing,
    equals,
    gap,
    leader,
    race,
    stop_behind,
)

BATCH = 100


@dataclass
class Machine:
    """Trains in ways of known speed (samples per second), and has a clock that its steps move."""

    speeds: dict[str, float]
    cold_s: float = 0.0
    noise: float = 0.0
    now: float = 0.0
    unfit: tuple[str, ...] = ()
    calls: list[tuple[str, int]] = field(default_factory=list)
    drift: float = 1.0

    def __post_init__(self) -> None:
        self.random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def measure(self, candidate: str, steps: int) -> Timing:
        if candidate in self.unfit:
            raise BadModel(f"{candidate} does not fit")
        cold = self.cold_s if all(candidate != name for name, _ in self.calls) else 0.0
        self.calls.append((candidate, steps))
        slower = self.drift ** (self.now / 10) * self.random.lognormvariate(0.0, self.noise)
        seconds = cold + steps * BATCH / self.speeds[candidate] * slower
        self.now += seconds
        return Timing(steps, steps * BATCH, seconds)

    def race(self, budget_s: float = 50.0, **options: bool) -> dict[str, Contender[str]]:
        entries = race(list(self.speeds), self.measure, self.clock, self.now + budget_s, **options)
        return {entry.candidate: entry for entry in entries}


def entry(candidate: str, *turns: float, fate: Fate = Fate.RACING) -> Contender[str]:
    return Contender(candidate, fate, None, dict(enumerate(turns, start=1)))


def test_the_fastest_leads_and_the_clearly_slower_ones_are_stopped() -> None:
    found = Machine({"slow": 700.0, "fast": 1000.0, "medium": 900.0}).race()
    assert leader(list(found.values())).candidate == "fast"
    assert [found[name].fate for name in ("slow", "medium")] == [Fate.STOPPED] * 2
    assert found["slow"].steps < found["medium"].steps < found["fast"].steps


def test_a_hopeless_candidate_gets_a_single_step() -> None:
    machine = Machine({"native": 100.0, "emulated": 10.0})
    found = machine.race()
    assert (found["emulated"].fate, found["emulated"].steps) == (Fate.STOPPED, 1)
    assert found["emulated"].rate == pytest.approx(10.0)


def test_a_slow_first_step_alone_is_no_reason_to_stop_where_it_is_short() -> None:
    machine = Machine({"a": 100_000.0, "b": 100_000.0}, cold_s=0.05)
    machine.measure("a", 1)  # a is warm already: its first step takes a fiftieth of b's
    assert machine.race()["b"].turns


def test_batches_of_different_size_are_compared_by_sample() -> None:
    def measure(batch: int, steps: int) -> Timing:
        clock[0] += steps * batch / 100
        return Timing(steps, steps * batch, steps * batch / 100)

    clock = [0.0]
    small, large = race([64, 512], measure, lambda: clock[0], 60.0)
    assert (small.fate, large.fate) == (Fate.RACING, Fate.RACING)
    assert gap(large, small).ratio == pytest.approx(1.0)


def test_the_race_ends_when_the_best_is_clear() -> None:
    machine = Machine({"a": 1000.0, "b": 500.0})
    machine.race(budget_s=1000.0)
    assert machine.now < 20.0


def test_equally_fast_candidates_end_the_race_too() -> None:
    machine = Machine({"a": 1000.0, "b": 1000.0, "c": 995.0})
    found = machine.race(budget_s=1000.0)
    assert machine.now < 60.0
    assert {one.candidate for one in equals(list(found.values()))} == {"a", "b", "c"}


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("speed", [1e6, 1000.0, 60.0])
def test_the_budget_is_kept(noise: float, speed: float) -> None:
    machine = Machine({name: speed + number for number, name in enumerate("abcdefgh")}, 0.1, noise)
    machine.race(budget_s=20.0)
    # A turn that seemed to fit may be slower than the one before it.
    assert machine.now <= 20.0 + 2 * max(LONGEST_S, BATCH / speed)


def test_a_model_too_slow_for_the_budget_is_measured_once_and_the_rest_is_not() -> None:
    machine = Machine({"a": 5.0, "b": 5.0, "c": 5.0})
    found = machine.race(budget_s=25.0)
    assert machine.calls == [("a", 1)]
    assert [one.fate for one in found.values()] == [Fate.RACING, Fate.WAITING, Fate.WAITING]
    assert leader(list(found.values())).rate == pytest.approx(5.0)


def test_many_candidates_fit_into_the_budget() -> None:
    speeds = {f"{number}": 2000.0 - 40 * number for number in range(32)}
    machine = Machine(speeds, cold_s=0.1, noise=0.03)
    found = machine.race(budget_s=45.0)
    assert machine.now <= 47.0
    assert speeds[leader(list(found.values())).candidate] >= 0.95 * 2000.0


@pytest.mark.parametrize("seed", range(20))
def test_the_pick_is_within_five_percent_of_the_best_on_a_noisy_machine(seed: int) -> None:
    speeds = {"a": 1000.0, "b": 980.0, "c": 930.0, "d": 900.0, "e": 600.0, "f": 300.0}
    machine = Machine(speeds, cold_s=0.2, noise=0.04, drift=1.05)
    machine.random = random.Random(seed)
    found = list(machine.race(budget_s=40.0).values())
    assert all(speeds[one.candidate] >= 950.0 for one in equals(found))


def test_a_machine_that_slows_down_slows_all_alike() -> None:
    found = Machine({"a": 1000.0, "b": 960.0}, drift=2.0).race(budget_s=30.0, exhaustive=True)
    assert gap(found["b"], found["a"]).ratio == pytest.approx(0.96, abs=0.03)


def test_nothing_is_stopped_where_all_are_to_be_measured() -> None:
    machine = Machine({"a": 1000.0, "b": 500.0, "c": 20.0})
    found = machine.race(budget_s=200.0, exhaustive=True)
    assert {one.fate for one in found.values()} == {Fate.RACING}
    assert {len(one.turns) for one in found.values()} <= {MOST_ROUNDS, MOST_ROUNDS - 1} or machine.now > 190.0


def test_rounds_begin_with_another_candidate_each_time() -> None:
    machine = Machine({"a": 1000.0, "b": 1000.0})
    machine.race()
    turns = [name for name, steps in machine.calls if steps not in (1, FEW)]
    assert turns[:4] == ["b", "a", "a", "b"]


def test_a_candidate_that_does_not_fit_is_told_and_the_others_race() -> None:
    found = Machine({"a": 1000.0, "b": 900.0}, unfit=("a",)).race()
    assert found["a"].fate is Fate.UNFIT
    assert str(found["a"].problem) == "a does not fit"
    assert leader(list(found.values())).candidate == "b"


def test_when_none_fits_the_first_problem_is_raised() -> None:
    with pytest.raises(BadModel, match="a does not fit"):
        Machine({"a": 1000.0, "b": 900.0}, unfit=("a", "b")).race()


def test_a_gap_is_the_median_over_the_rounds_of_both() -> None:
    found = gap(entry("a", 90.0, 80.0, 99.0, 1.0), entry("b", 100.0, 100.0, 100.0))
    assert found.ratio == pytest.approx(0.90)


def test_the_noise_of_a_gap_shrinks_with_the_rounds_and_grows_with_the_scatter() -> None:
    best = entry("best", *[100.0] * 16)
    once, often = gap(entry("a", 90.0), best), gap(entry("a", *[90.0] * 16), best)
    scattered = gap(entry("a", *[80.0, 100.0] * 8), best)
    assert once.noise == 0.5
    assert often.noise == pytest.approx(0.5 / 16**2)
    assert scattered.noise == pytest.approx(3.1416 * 0.1 / 4, rel=1e-3)


def test_one_bad_turn_does_not_stop_a_candidate() -> None:
    entries = [entry("a", 100.0), entry("b", 60.0)]
    stop_behind(entries)
    assert entries[1].fate is Fate.RACING


def test_what_is_as_fast_within_the_noise_counts_as_equal_and_what_lies_beyond_does_not() -> None:
    best = entry("best", *[100.0] * 6)
    within = entry("within", 98.0, 102.0, 98.6, 101.0, 94.0, 98.4)
    beyond = entry("beyond", *[98.5] * 6)
    far = entry("far", 60.0, 130.0, 80.0, 110.0, 75.0, 90.0)
    assert [one.candidate for one in equals([best, within, beyond, far])] == ["best", "within"]


def test_rates_and_spreads_are_medians_and_quartiles() -> None:
    one = entry("a", 100.0, 110.0, 90.0, 400.0, 80.0)
    assert one.rate == 100.0
    assert one.spread == pytest.approx(0.1)
    assert (entry("b").rate, entry("b", 5.0).spread) == (None, None)
