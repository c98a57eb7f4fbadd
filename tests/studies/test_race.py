"""Races with made-up speeds and a made-up clock: who wins, who stops early, and how long it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tutti.errors import BadModel
from tutti.studies.autotune.race import ROUNDS, TURN_S, Entry, Timing, leader, race, ratio, stop_slow, ties

BATCH = 100


@dataclass
class Machine:
    """Trains in ways of known speed, in samples per second, and has a clock that its steps move."""

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

    def race(self, budget_s: float = 50.0, **options: bool) -> dict[str, Entry[str]]:
        end = self.now + budget_s
        entries = race(list(self.speeds), self.measure, self.clock, lambda _: end, **options)
        return {entry.candidate: entry for entry in entries}


def entry(candidate: str, *turns: float) -> Entry[str]:
    return Entry(candidate, Timing(1, 1, 1 / turns[0]) if turns else None, dict(enumerate(turns, start=1)))


def test_the_fastest_leads_and_clearly_slower_candidates_are_stopped() -> None:
    found = Machine({"slow": 700.0, "fast": 1000.0, "medium": 900.0}).race()
    assert leader(list(found.values())).candidate == "fast"
    assert [found[name].stopped for name in ("slow", "medium")] == [True, True]
    assert found["slow"].steps < found["medium"].steps < found["fast"].steps


def test_a_candidate_far_behind_gets_one_turn() -> None:
    found = Machine({"native": 100.0, "emulated": 10.0}).race()
    assert (found["emulated"].stopped, len(found["emulated"].turns)) == (True, 1)
    assert found["emulated"].rate == pytest.approx(10.0)


def test_candidates_are_measured_in_order_while_there_is_time_for_the_longest_turn() -> None:
    found = Machine({"a": 1000.0, "b": 1200.0, "c": 2000.0}, cold_s=0.5).race(budget_s=2.0)
    assert [one.first is not None for one in found.values()] == [True, True, False]
    assert leader(list(found.values())).candidate == "b"


def test_the_fastest_step_decides_when_time_is_up() -> None:
    machine = Machine({"slow": 100.0, "fast": 10_000.0, "never": 1000.0})
    entries = race(list(machine.speeds), machine.measure, machine.clock, lambda step_s: 10 * step_s)
    assert [entry.first is not None for entry in entries] == [True, True, False]


def test_batches_of_different_size_are_compared_by_sample() -> None:
    def measure(batch: int, steps: int) -> Timing:
        clock[0] += steps * batch / 100
        return Timing(steps, steps * batch, steps * batch / 100)

    clock = [0.0]
    small, large = race([64, 512], measure, lambda: clock[0], lambda _: 60.0)
    assert not small.stopped
    assert not large.stopped
    assert ratio(large, small) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("speeds", "tied", "most_s"),
    [
        ({"a": 1000.0, "b": 500.0}, {"a"}, 20.0),
        ({"a": 1000.0, "b": 1000.0, "c": 995.0}, {"a", "b", "c"}, 60.0),
    ],
)
def test_a_race_ends_before_its_time_is_up(speeds: dict[str, float], tied: set[str], most_s: float) -> None:
    machine = Machine(speeds)
    found = machine.race(budget_s=1000.0)
    assert machine.now < most_s
    assert {one.candidate for one in ties(list(found.values()))} == tied


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("speed", [1e6, 1000.0, 60.0])
def test_the_budget_is_kept(noise: float, speed: float) -> None:
    machine = Machine({name: speed + number for number, name in enumerate("abcdefgh")}, 0.1, noise)
    machine.race(budget_s=20.0)
    # A turn may take longer than the one before it.
    assert machine.now <= 20.0 + 2 * max(TURN_S[1], BATCH / speed)


def test_with_a_slow_model_only_the_first_candidate_is_measured() -> None:
    machine = Machine({"a": 5.0, "b": 5.0, "c": 5.0})
    found = machine.race(budget_s=25.0)
    assert machine.calls == [("a", 1)]
    assert [one.first is None for one in found.values()] == [False, True, True]
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
    assert all(speeds[one.candidate] >= 950.0 for one in ties(found))


def test_a_machine_that_slows_down_slows_all_alike() -> None:
    found = Machine({"a": 1000.0, "b": 960.0}, drift=2.0).race(budget_s=30.0, exhaustive=True)
    assert ratio(found["b"], found["a"]) == pytest.approx(0.96, abs=0.03)


def test_an_exhaustive_race_stops_no_candidate() -> None:
    machine = Machine({"a": 1000.0, "b": 500.0, "c": 20.0})
    found = machine.race(budget_s=200.0, exhaustive=True)
    assert not any(one.stopped for one in found.values())
    assert machine.now > 190.0


def test_each_round_begins_with_another_candidate() -> None:
    machine = Machine({"a": 1000.0, "b": 1000.0})
    machine.race()
    assert [name for name, _ in machine.calls][2 - 2 * ROUNDS :][:4] == ["b", "a", "a", "b"]


def test_the_others_race_if_a_candidate_does_not_fit() -> None:
    found = Machine({"a": 1000.0, "b": 900.0}, unfit=("a",)).race()
    assert str(found["a"].problem) == "a does not fit"
    assert leader(list(found.values())).candidate == "b"
    with pytest.raises(BadModel, match="a does not fit"):
        Machine({"a": 1000.0, "b": 900.0}, unfit=("a", "b")).race()


def test_speeds_are_compared_by_the_median_over_shared_rounds() -> None:
    assert ratio(entry("a", 90.0, 80.0, 99.0, 1.0), entry("b", 100.0, 100.0, 100.0)) == pytest.approx(0.90)


@pytest.mark.parametrize(
    ("rounds", "speed", "stopped"), [(1, 60.0, False), (2, 60.0, True), (4, 96.0, False)]
)
def test_the_margin_shrinks_with_the_rounds(rounds: int, speed: float, stopped: bool) -> None:
    entries = [entry("a", *[100.0] * rounds), entry("b", *[speed] * rounds)]
    stop_slow(entries, rounds)
    assert entries[1].stopped is stopped


def test_entries_within_two_percent_are_ties() -> None:
    entries = [entry("best", 100.0), entry("within", 98.5), entry("beyond", 97.0)]
    assert [one.candidate for one in ties(entries)] == ["best", "within"]


def test_rates_and_spreads_are_medians_and_quartiles() -> None:
    one = entry("a", 100.0, 110.0, 90.0, 400.0, 80.0)
    assert one.rate == 100.0
    assert one.spread == pytest.approx(0.1)
    assert (entry("b").rate, entry("b", 5.0).spread) == (None, None)
