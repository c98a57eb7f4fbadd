"""The result of a plan: a table, the pick and the reasons. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final

from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.race import Entry, leader, racing, ratio, ties
from tutti.studies.autotune.twins import REMEDY, Twins
from tutti.tables import TextTable
from tutti.terminal import console_on

Way = Entry[Candidate]
"""A way to train, and its measurements."""

HEADS: Final = (
    *("ranks", "threads", "precision", "layout", "batch", "samples/s", "spread", "of the pick", "remark"),
)

FASTER: Final = 1.05
"""The least speed-up that makes another precision worth its rounding."""


@dataclass(frozen=True)
class Recommendation:
    """The measurements, and the pick."""

    ways: Sequence[Way]  # the ways to choose from
    others: Sequence[Way] = field(default_factory=list)  # the best of them again, and another precision
    twins: Twins | None = None  # short trainings in that precision; None: it was not faster, or not tried
    seconds: float = 0.0  # of measuring
    allowed_s: float = 0.0  # the seconds that measuring could have taken
    samples: int = 0  # the number of training samples
    waited: float = 0.0  # the share of the time in which ranks waited for a core

    @property
    def pick(self) -> Way:
        """The best of the ways, or the faster one in another precision if its loss follows."""
        faster = self.faster
        return faster if faster is not None and self.twins is not None and self.twins.follows else self.best

    @property
    def best(self) -> Way:
        """The simplest of the fastest ways."""
        return min(ties(self.ways), key=lambda way: way.candidate.complexity)

    @property
    def faster(self) -> Way | None:
        """The fastest in another precision, if it is faster than the best of the ways."""
        reference = self._reference()
        if reference is None or not racing(self.others):
            return None
        way = leader(self.others)
        return way if way is not reference and len(way.turns) > 1 and ratio(way, reference) > FASTER else None

    def why(self) -> list[str]:
        """Return the reason for the pick and the gain of another precision, one sentence each."""
        return [self._reason(), *self._precision()]

    def in_short(self) -> list[str]:
        """Return one line for each choice that was made."""
        measured = sum(way.rate is not None for way in self.ways)
        ways = f"{measured} combination{'' if measured == 1 else 's'}"
        raced = f"measured {ways} in {self.seconds:.1f} s: {self._reason()}"
        others = self._precision() if any(way.first for way in self.others) else []
        return [raced, *others] if len(self.ways) > 1 or not others else others

    def _reason(self) -> str:
        pick = self.best
        rate = f"{self._name(pick)}: {pick.rate or 0:,.0f} samples/s"
        even = [self._name(way) for way in ties(self.ways) if way is not pick]
        if even:
            return f"{rate}; as fast, but not as simple: {' and '.join(even)}"
        rivals = [way for way in self.ways if way is not pick and way.rate is not None]
        if rivals:
            second = max(rivals, key=lambda way: ratio(way, pick))
            return f"{rate}; the next, {self._name(second)}, has {ratio(second, pick):.0%} of that speed"
        late = any(way.first is None and way.problem is None for way in self.ways)
        if not late:
            return f"{rate}; the only way"
        first = rate if pick.turns else f"{self._name(pick)}, the most likely way"
        return f"{first}; no time was left for others: {REMEDY}"

    def _name(self, way: Way) -> str:
        """Name a way by what sets it apart from the others, such as "2 ranks x 1 thread, channels_last"."""
        one, every = way.candidate, [other.candidate for other in self.ways]
        parts = {"precision": one.precision, "layout": one.layout, "batch_size": f"batch {one.batch_size}"}
        differing = [text for part, text in parts.items() if len({getattr(c, part) for c in every}) > 1]
        return ", ".join([one.shape, *differing])

    def _precision(self) -> list[str]:
        """Return the gain of another precision, and whether it is chosen; empty if none was tried."""
        reference = self._reference()
        rivals = [way for way in self.others if way is not reference]
        if not rivals:
            return []
        measured = [way for way in rivals if way.rate is not None]
        if reference is None or not measured:
            return [f"{rivals[0].candidate.precision} is not chosen: {_remark(rivals[0])}"]
        way = self.faster or max(measured, key=lambda way: ratio(way, reference))
        name, speed = way.candidate.precision, f"{ratio(way, reference):.2f} times as fast"
        if self.faster is None:
            return [f"{name} is not chosen: it is {speed} here"]
        if self.twins is None:
            return [f"{name} is not chosen: it is {speed}, but no time was left to compare losses: {REMEDY}"]
        verdict, link = ("chosen", "and") if self.twins.follows else ("not chosen", "but")
        return [f"{name} is {verdict}: {self._name(way)} in {name} is {speed}, {link} {self.twins.why()}"]

    def _reference(self) -> Way | None:
        """Return the best way as measured beside the other precision."""
        candidate = self.best.candidate
        return next((way for way in self.others if way.candidate == candidate and way.rate), None)

    def of_pick(self, way: Way) -> float | None:
        """Return the speed of a way relative to the pick; None if not measured."""
        if way.rate is None or self.pick.rate is None:
            return None
        return self._of_best(way) / self._of_best(self.pick)

    def _of_best(self, way: Way) -> float:
        return ratio(way, self.best if way in self.ways else self._reference() or self.best)

    def rows(self) -> list[Way]:
        """Return all ways, the fastest first, and those without a measurement last."""
        further = [way for way in self.others if way.candidate != self.best.candidate]
        return sorted([*self.ways, *further], key=lambda way: -(self.of_pick(way) or 0.0))

    def show(self, stream: IO[str]) -> None:
        """Print the table."""
        table = TextTable(HEADS, left=("precision", "layout", "remark"), drop=("spread", "batch", "layout"))
        for way in self.rows():
            table.add_row(*self._cells(way), style="bold" if way is self.pick else "")
        console_on(stream).print(table)

    def _cells(self, way: Way) -> list[str]:
        one, speed = way.candidate, self.of_pick(way)
        return [
            str(one.ranks),
            str(one.threads),
            one.precision,
            one.layout,
            str(one.batch_size),
            "" if way.rate is None else f"{way.rate:,.0f}",
            "" if way.spread is None else f"± {way.spread:.0%}",
            "" if speed is None else f"{speed:.2f}",
            ", ".join(filter(None, ["pick" if way is self.pick else "", _remark(way)])),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; speeds in samples per second, `turns` by round."""
        return {
            "pick": asdict(self.pick.candidate),
            "why": self.why(),
            "seconds": self.seconds,
            "short_trainings": None if self.twins is None else self.twins.as_json(),
            "candidates": [
                {
                    **asdict(way.candidate),
                    "samples_per_s": way.rate,
                    "spread": way.spread,
                    "of_the_pick": self.of_pick(way),
                    "first_step_s": None if way.first is None else way.first.seconds,
                    "steps": way.steps,
                    "turns": {str(turn): rate for turn, rate in way.turns.items()},
                    "remark": _remark(way),
                }
                for way in self.rows()
            ],
        }


def _remark(way: Way) -> str:
    if way.problem is not None:
        return f"does not fit: {way.problem}"
    if way.first is None:
        return "not measured: no time left"
    if way.stopped:
        return f"stopped early, after {way.steps} step{'s' if way.steps > 1 else ''}"
    return "" if way.turns else "its first steps: no time for more"
