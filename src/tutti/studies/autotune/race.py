"""A race of candidates: each is measured for a moment, the fastest for longer. Needs no torch.

    round 1    a ▌██ b ▌██ c ▌██ d ▌██     first steps ▌, then a turn; d is far behind and stops
    round 2    b ██ c ██ a ██              c is behind by more than the margin and stops
    round 3    a ██ b ██                   the margin shrinks with the rounds

The most likely candidates come first, as time may be up in the first round. Candidates take turns, so other
load on the machine slows all of them alike. Two are compared by the median over the rounds of the ratio of
their speeds.

Source: Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
(fewer candidates, more measurements of each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Final, Generic, TypeVar

from tutti.errors import UserError

C = TypeVar("C")

WARM_UP_STEPS: Final = 3
"""Steps after the first one, by which the duration of a step is estimated."""

TURN_S: Final = (0.05, 1.0)
"""Shortest and longest turn."""

ROUNDS: Final = 8
"""Most rounds of a race; the race ends earlier when one candidate is left."""

MARGIN: Final = 0.05
"""A candidate stops when it is slower than the fastest by more than max(MARGIN, 0.5 / rounds^2)."""

TIE: Final = 0.02
"""Candidates slower than the fastest by less than this count as equally fast."""


@dataclass(frozen=True)
class Timing:
    """The duration of some training steps."""

    steps: int
    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-9)


Measure = Callable[[C, int], Timing]
"""Makes a number of training steps with the candidate; raises `UserError` if it cannot."""


@dataclass(eq=False)
class Entry(Generic[C]):
    """A candidate and its measurements."""

    candidate: C
    first: Timing | None = None  # the first step; None: not measured
    turns: dict[int, float] = field(default_factory=dict)  # samples per second by round
    steps: int = 0  # in all
    step_s: float = 0.0  # seconds of a step, in the last measurement
    stopped: bool = False  # left the race early
    problem: UserError | None = None  # why it cannot be trained

    @property
    def rate(self) -> float | None:
        """Samples per second: the median of the turns, or else of the first step; None: not measured."""
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
        """Add a measurement."""
        self.steps += timing.steps
        self.step_s = timing.seconds / timing.steps


def ratio(one: Entry[C], other: Entry[C]) -> float:
    """Return the speed of `one` / `other`: the median over shared rounds, or else by rates."""
    rounds = one.turns.keys() & other.turns.keys()
    if rounds:
        return median(one.turns[number] / other.turns[number] for number in rounds)
    assert one.rate is not None, "not measured"
    assert other.rate is not None, "not measured"
    return one.rate / other.rate


def racing(entries: Sequence[Entry[C]]) -> list[Entry[C]]:
    """Return the entries that were measured and have not stopped."""
    return [entry for entry in entries if entry.first is not None and not entry.stopped]


def leader(entries: Sequence[Entry[C]]) -> Entry[C]:
    """Return the fastest in the rounds that all entries in the race share, or else by their rates."""
    rivals = racing(entries)
    shared = set.intersection(*(set(entry.turns) for entry in rivals))
    if not shared:
        return max(rivals, key=lambda entry: entry.rate or 0.0)
    return max(rivals, key=lambda entry: median(entry.turns[number] for number in shared))


def ties(entries: Sequence[Entry[C]]) -> list[Entry[C]]:
    """Return the entries in the race that are as fast as the leader, the leader first."""
    best = leader(entries)
    rivals = [entry for entry in racing(entries) if entry is not best]
    return [best, *(entry for entry in rivals if ratio(entry, best) >= 1 - TIE)]


def race(
    candidates: Sequence[C],
    measure: Measure[C],
    clock: Callable[[], float],
    deadline: Callable[[float], float],
    *,
    exhaustive: bool = False,
) -> list[Entry[C]]:
    """Measure candidates until one is left, all rounds are over, or time is up; return their entries.

    Args:
        candidates: the most likely first. The first one that fits makes a step even if time is up.
        measure: makes some steps.
        clock: returns seconds.
        deadline: returns the end of the race, by that clock, from the seconds of a step; the earliest counts.
        exhaustive: stop no candidate, and go on until time is up.

    Raises:
        UserError: no candidate fits; it is the error of the first one.
    """
    entries = [Entry(candidate) for candidate in candidates]
    end = _first_round(entries, measure, clock, deadline)
    number = 1
    while exhaustive or number < ROUNDS:
        if not exhaustive:
            stop_slow(entries, number)
            if number > 2 and len(racing(entries)) == 1:
                break
        number += 1
        if not _round(number, racing(entries), measure, clock, end):
            break
    return entries


def stop_slow(entries: Sequence[Entry[C]], rounds: int) -> None:
    """Stop the entries that are slower than the leader by more than the margin."""
    best, margin = leader(entries), max(MARGIN, 0.5 / rounds**2)
    for entry in racing(entries):
        entry.stopped = ratio(entry, best) < 1 - margin


def _first_round(
    entries: Sequence[Entry[C]],
    measure: Measure[C],
    clock: Callable[[], float],
    deadline: Callable[[float], float],
) -> float:
    """Measure each once while there is time for the longest turn so far; return the deadline."""
    end, longest = math.inf, 0.0
    for entry in entries:
        began, rivals = clock(), racing(entries)
        if rivals and began + longest > end:
            break
        try:
            entry.first = measure(entry.candidate, 1)
        except UserError as error:
            entry.problem = error
            continue
        entry.note(entry.first)
        if not rivals:
            end = deadline(entry.step_s)
        if entry.step_s < TURN_S[0] and clock() < end:
            entry.note(measure(entry.candidate, WARM_UP_STEPS))
        seconds = _turn_s(end - clock(), len(entries)) if rivals else TURN_S[0]
        _turn(entry, 1, measure, seconds, end - clock())
        end = min(end, deadline(entry.step_s))
        longest = max(longest, clock() - began)
    if not racing(entries):
        raise next(entry.problem for entry in entries if entry.problem is not None)
    return end


def _round(
    number: int, rivals: Sequence[Entry[C]], measure: Measure[C], clock: Callable[[], float], end: float
) -> bool:
    """Give each rival a turn; return whether there was time for all."""
    seconds = _turn_s(end - clock(), len(rivals))
    first = (number - 1) % len(rivals)
    order = [*rivals[first:], *rivals[:first]]
    return all(_turn(entry, number, measure, seconds, end - clock()) for entry in order)


def _turn_s(left_s: float, rivals: int) -> float:
    shortest, longest = TURN_S
    return min(longest, max(shortest, left_s / (ROUNDS * rivals)))


def _turn(entry: Entry[C], number: int, measure: Measure[C], seconds: float, left_s: float) -> bool:
    """Give an entry a turn if there is time for it."""
    steps = max(1, round(seconds / max(entry.step_s, 1e-9)))
    if steps * entry.step_s > left_s:
        return False
    timing = measure(entry.candidate, steps)
    entry.turns[number] = timing.rate
    entry.note(timing)
    return True
