"""A race of candidates: all are measured for a moment, the best for longer. Needs no torch.

    first steps   a ▌ b ▌ c ▌ d ▌ e ████████     one step of each; e is hopeless and goes
    round 1       a ██ b ██ c ██ d ██
    round 2       b ██ c ██ d ██ a ██            d is behind by more than the noise and goes
    round 3       c ███ a ███ b ███              turns get longer, until the best is clear or time is up

Taking turns spreads whatever else the machine does over all of them, so candidates are compared round by
round: by the median of the ratios of their speeds. How these ratios scatter says how far their median may be
off, and nothing goes before it is behind by more than that.

Sources: Maron and Moore 1994, "Hoeffding Races: Accelerating Model Selection Search for Classification and
Function Approximation" (what is surely worse goes, the rest shares the time); Jamieson and Talwalkar 2016,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization" (fewer candidates, longer turns).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, median, quantiles
from typing import Final, Generic, TypeVar

from tutti.errors import UserError

C = TypeVar("C")

HOPELESS: Final = 5.0
"""A first step that takes so many times as long as at the best's speed ends a candidate's race ..."""

COLD_S: Final = 2.0
"""... if it is longer by so many seconds, too: a first step sets up memory, threads and kernels."""

SHORT_S: Final = 0.25
"""A first step below this says little about the next ones: a few more are made to know their pace."""

FEW: Final = 4

SHORTEST_S: Final = 0.15
LONGEST_S: Final = 1.0
"""Seconds of a turn."""

ROUNDS: Final = 8
"""Into how many rounds the time that is left is divided."""

MOST_ROUNDS: Final = 40
"""After so many, more of them say nothing new."""

ENOUGH: Final = 3
"""Rounds before the race may end early."""

UNKNOWN: Final = 0.5
"""The noise of a ratio that was measured once; its scatter is believed more with each round."""

BEHIND: Final = 0.02
"""Contenders that are surely slower than the best by more than this are out."""

SURE: Final = 1.25
"""By how many times the noise: it is asked after every round, so chance has many tries."""

CLOSE: Final = 0.03
"""When all that are left are surely slower by less than this, the race ends: any of them will do."""

TIE: Final = 0.02
"""Contenders slower by less than this are as good as the best, if the noise hides the difference."""


class Fate(Enum):
    """The fate of a candidate."""

    WAITING = "not measured"
    RACING = "measured"
    STOPPED = "stopped early"
    UNFIT = "does not fit"


@dataclass(frozen=True)
class Timing:
    """Some training steps.

    Attributes:
        steps: how many.
        samples: behind all of them.
        seconds: that they took.
    """

    steps: int
    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-9)


Measure = Callable[[C, int], Timing]
"""Makes so many training steps in the way of a candidate; raises `UserError` where that does not fit."""


@dataclass
class Contender(Generic[C]):
    """A candidate and what was measured of it.

    Attributes:
        candidate: what was measured.
        fate: what became of it.
        first: its first step.
        turns: samples per second in each round that it took part in.
        steps: that it made in all.
        step_s: seconds of a step, as last seen.
        problem: why it does not fit.
    """

    candidate: C
    fate: Fate = Fate.WAITING
    first: Timing | None = None
    turns: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    step_s: float = 0.0
    problem: UserError | None = None

    @property
    def rate(self) -> float | None:
        """Samples per second: the median of the turns, or of the first step alone; None: not measured."""
        if self.turns:
            return median(self.turns.values())
        return None if self.first is None else self.first.rate

    @property
    def spread(self) -> float | None:
        """Half the distance between the turns' quartiles, as a share of the median; None below two turns."""
        if len(self.turns) < 2:
            return None
        low, middle, high = quantiles(self.turns.values(), n=4, method="inclusive")
        return (high - low) / 2 / middle

    def note(self, timing: Timing) -> None:
        """Take steps into account."""
        self.steps += timing.steps
        self.step_s = timing.seconds / timing.steps


@dataclass(frozen=True)
class Gap:
    """The speed of one candidate compared with another.

    Attributes:
        ratio: of their speeds.
        noise: how far that may be off, either way.
    """

    ratio: float
    noise: float


def gap(one: Contender[C], other: Contender[C]) -> Gap:
    """Compare the speeds of `one` and `other` by the rounds that both took part in, or else their rates."""
    ratios = [one.turns[turn] / other.turns[turn] for turn in one.turns.keys() & other.turns.keys()]
    if not ratios:
        rates = one.rate, other.rate
        assert rates[0] is not None, "what was not measured cannot be compared"
        assert rates[1] is not None, "what was not measured cannot be compared with"
        return Gap(rates[0] / rates[1], UNKNOWN)
    middle = median(ratios)
    # Twice the standard error of a median, from the mean deviation: sqrt(pi / 2) for either.
    scatter = 2 * (math.pi / 2) * fmean(abs(ratio - middle) for ratio in ratios) / math.sqrt(len(ratios))
    return Gap(middle, max(scatter, UNKNOWN / len(ratios) ** 2))


def racing(entries: Sequence[Contender[C]]) -> list[Contender[C]]:
    """Those that are still in the race."""
    return [entry for entry in entries if entry.fate is Fate.RACING]


def leader(entries: Sequence[Contender[C]]) -> Contender[C]:
    """The fastest in the rounds that all who are in the race took part in, or else by their rates."""
    rivals = racing(entries)
    together = set.intersection(*(set(entry.turns) for entry in rivals))

    def speed(entry: Contender[C]) -> float:
        return median(entry.turns[turn] for turn in together) if together else entry.rate or 0.0

    return max(rivals, key=speed)


def equals(entries: Sequence[Contender[C]]) -> list[Contender[C]]:
    """The leader, and those in the race that are as fast: slower by less than the noise, and than TIE."""
    best = leader(entries)
    gaps = [(entry, gap(entry, best)) for entry in racing(entries) if entry is not best]
    return [best] + [entry for entry, to in gaps if to.ratio + to.noise >= 1 and to.ratio >= 1 - TIE]


def race(
    candidates: Sequence[C],
    measure: Measure[C],
    clock: Callable[[], float],
    deadline: float,
    *,
    exhaustive: bool = False,
) -> list[Contender[C]]:
    """Measure candidates until the best is clear, or time is up.

    Args:
        candidates: in the order of the first steps; those that seem promising should come first.
        measure: makes some steps.
        clock: seconds.
        deadline: when, by that clock, no turn may begin that would end later. The first candidate is measured
            all the same.
        exhaustive: nothing is stopped early: all are measured until time is up.

    Returns:
        One entry for each candidate, in the same order.

    Raises:
        UserError: no candidate fits; this is what the first one said.
    """
    entries = [Contender(candidate) for candidate in candidates]
    _first_steps(entries, measure, clock, deadline)
    if not exhaustive:
        _stop_hopeless(entries)
    for number in range(1, MOST_ROUNDS + 1):
        if not _round(number, racing(entries), measure, clock, deadline):
            break
        if not exhaustive:
            stop_behind(entries)
            if number >= ENOUGH and decided(entries):
                break
    return entries


def stop_behind(entries: Sequence[Contender[C]]) -> None:
    """End the race of those that are surely slower than the best."""
    best = leader(entries)
    for entry in racing(entries):
        to = gap(entry, best)
        if to.ratio + SURE * to.noise < 1 - BEHIND:
            entry.fate = Fate.STOPPED


def decided(entries: Sequence[Contender[C]]) -> bool:
    """Tell whether it no longer matters which of those in the race is taken."""
    best = leader(entries)
    gaps = [gap(entry, best) for entry in racing(entries) if entry is not best]
    return all(to.ratio - to.noise > 1 - CLOSE for to in gaps)


def _first_steps(
    entries: Sequence[Contender[C]], measure: Measure[C], clock: Callable[[], float], deadline: float
) -> None:
    shortest = math.inf
    for entry in entries:
        if shortest < math.inf and clock() + shortest > deadline:
            return
        try:
            entry.first = measure(entry.candidate, 1)
        except UserError as error:
            entry.fate, entry.problem = Fate.UNFIT, error
            continue
        entry.fate = Fate.RACING
        entry.note(entry.first)
        shortest = min(shortest, entry.first.seconds)
        if entry.step_s < SHORT_S:
            entry.note(measure(entry.candidate, FEW))
    if entries and all(entry.fate is Fate.UNFIT for entry in entries):
        assert entries[0].problem is not None
        raise entries[0].problem


def _stop_hopeless(entries: Sequence[Contender[C]]) -> None:
    """End the race of those whose first step alone says enough."""
    firsts = [(entry, entry.first) for entry in racing(entries) if entry.first is not None]
    best = max(first.rate for _, first in firsts)
    for entry, first in firsts:
        seconds = first.samples / best
        if first.seconds > max(HOPELESS * seconds, seconds + COLD_S):
            entry.fate = Fate.STOPPED


def _round(
    number: int,
    rivals: Sequence[Contender[C]],
    measure: Measure[C],
    clock: Callable[[], float],
    deadline: float,
) -> bool:
    """One turn of each; whether there was time for all."""
    seconds = min(LONGEST_S, max(SHORTEST_S, (deadline - clock()) / (ROUNDS * len(rivals))))
    first = number % len(rivals)
    for entry in [*rivals[first:], *rivals[:first]]:
        steps = max(1, round(seconds / max(entry.step_s, 1e-9)))
        if clock() + steps * entry.step_s > deadline:
            return False
        timing = measure(entry.candidate, steps)
        entry.turns[number] = timing.rate
        entry.note(timing)
    return True
