"""The findings of a plan, and their report: a table, and the reasons. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final

from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.following import Twins
from tutti.studies.autotune.race import Contender, Fate, equals, gap, leader, racing
from tutti.tables import TextTable
from tutti.terminal import console_on

Way = Contender[Candidate]
"""A way to train, and what was measured of it."""

HEADS: Final = (
    "ranks",
    "threads",
    "precision",
    "layout",
    "batch",
    "samples/s",
    "spread",
    "of the pick",
    "remark",
)


@dataclass(frozen=True)
class Recommendation:
    """The measurements, and what to take.

    Attributes:
        ways: those to choose from.
        others: the best of them again, beside ways in another precision, which rounds more.
        twins: short trainings in that other precision; None: it was not faster, or not tried.
        seconds: that all of it took, the start of the ranks included.
    """

    ways: Sequence[Way]
    others: Sequence[Way] = field(default_factory=list)
    twins: Twins | None = None
    seconds: float = 0.0

    @property
    def pick(self) -> Way:
        """The best of the ways, or the faster one in another precision if its loss follows."""
        faster = self.faster
        return faster if faster is not None and self.twins is not None and self.twins.follows else self.best

    @property
    def best(self) -> Way:
        """The fastest to choose from; of those that are as fast within the noise, the simplest."""
        return min(equals(self.ways), key=lambda way: way.candidate.complexity)

    @property
    def faster(self) -> Way | None:
        """The fastest in another precision, if it is surely faster than the best of the ways."""
        reference = self._reference()
        if reference is None or not racing(self.others):
            return None
        way = leader(self.others)
        to = gap(way, reference)
        return None if way is reference or len(way.turns) < 2 or to.ratio - to.noise <= 1 else way

    def why(self) -> list[str]:
        """The reason for the pick, and what another precision brings, one sentence each."""
        return [self._reason(), *self._precision()]

    def in_short(self) -> list[str]:
        """The measurements and the choice, one line for each choice that there was."""
        measured = sum(way.rate is not None for way in self.ways)
        ways = f"{measured} combination{'' if measured == 1 else 's'}"
        raced = f"measured {ways} in {self.seconds:.0f} s: {self._reason()}"
        others = self._precision()
        return [raced, *others] if len(self.ways) > 1 or not others else others

    def _reason(self) -> str:
        pick = self.best
        found = f"{self._name(pick)}: {pick.rate or 0:,.0f} samples/s"
        even = [way for way in equals(self.ways) if way is not pick]
        if even:
            noise = max(gap(way, pick).noise for way in even)
            listed = " and ".join(self._name(way) for way in even)
            return f"{found}; as fast within the noise of {noise:.1%}, but not as simple: {listed}"
        rivals = [way for way in self.ways if way is not pick and way.rate is not None]
        if not rivals:
            late = any(way.fate is Fate.WAITING for way in self.ways)
            return f"{found}; " + ("no time was left for others: raise --budget" if late else "the only way")
        second = max(rivals, key=lambda way: gap(way, pick).ratio)
        to = gap(second, pick)
        sentence = f"{found}; the next, {self._name(second)}, has {to.ratio:.0%} of that speed"
        if to.ratio + to.noise > 1:
            sentence += f", give or take {to.noise:.0%}: a longer --budget says more"
        return sentence

    def _name(self, way: Way) -> str:
        """Name a way by what tells it from the others, such as "2 ranks x 1 thread, channels_last"."""
        one, every = way.candidate, [other.candidate for other in self.ways]
        parts = {"precision": one.precision, "layout": one.layout, "batch_size": f"batch {one.batch_size}"}
        telling = [text for part, text in parts.items() if len({getattr(c, part) for c in every}) > 1]
        return ", ".join([one.shape, *telling])

    def _precision(self) -> list[str]:
        """The gain by another precision, and whether it is chosen."""
        reference, faster = self._reference(), self.faster
        rivals = [way for way in self.others if way is not reference and way.rate is not None]
        if reference is None or not rivals:
            tried = [way for way in self.others if way is not reference]
            return (
                [f"{tried[0].candidate.precision} is not chosen: {self._remark(tried[0])}"] if tried else []
            )
        if faster is None:
            way = max(rivals, key=lambda way: gap(way, reference).ratio)
            to, name = gap(way, reference), way.candidate.precision
            if to.ratio + to.noise < 1:
                return [f"{name} is not chosen: it has {to.ratio:.0%} of that speed here"]
            speed = f"{to.ratio:.2f} times that speed, give or take {to.noise:.0%}"
            return [f"{name} is not chosen: it is not surely faster here ({speed})"]
        name, times = faster.candidate.precision, gap(faster, reference).ratio
        speed = f"{self._name(faster)} in {name} is {times:.2f} times as fast"
        if self.twins is None:
            return [
                f"{name} is not chosen: {speed}, but no time was left to compare its loss: raise --budget"
            ]
        if self.twins.follows:
            return [f"{name} is chosen: {speed}, and {self.twins.why()}"]
        return [f"{name} is not chosen: {speed}, but {self.twins.why()}"]

    def _reference(self) -> Way | None:
        """The best of the ways, as it was measured beside the other precision."""
        candidate = self.best.candidate
        return next((way for way in self.others if way.candidate == candidate and way.rate), None)

    def ratio(self, way: Way) -> float | None:
        """The speed of a way / that of the pick, from the rounds that both took part in; None: unknown."""
        if way.rate is None:
            return None
        if way is self.pick:
            return 1.0
        reference, pick = self._reference(), self.pick
        if not any(way is one for one in self.ways):
            reference = pick if any(pick is one for one in self.others) else reference
            return None if reference is None else gap(way, reference).ratio
        of_best = gap(way, self.best).ratio
        return of_best if pick is self.best or reference is None else of_best / gap(pick, reference).ratio

    def rows(self) -> list[Way]:
        """All ways, the fastest first, and those that were not measured last."""
        further = [way for way in self.others if way.candidate != self.best.candidate]
        return sorted([*self.ways, *further], key=lambda way: -(self.ratio(way) or 0.0))

    def show(self, stream: IO[str]) -> None:
        """Print the table."""
        table = TextTable(HEADS, left=("precision", "layout", "remark"), drop=("spread", "batch", "layout"))
        for way in self.rows():
            table.add_row(*self.cells(way), style="bold" if way is self.pick else "")
        console_on(stream).print(table)

    def cells(self, way: Way) -> list[str]:
        """A row of the table, with nothing where there is no number."""
        one, ratio = way.candidate, self.ratio(way)
        return [
            str(one.ranks),
            str(one.threads),
            one.precision,
            one.layout,
            str(one.batch_size),
            "" if way.rate is None else f"{way.rate:,.0f}",
            "" if way.spread is None else f"± {way.spread:.0%}",
            "" if ratio is None else f"{ratio:.2f}",
            ", ".join(filter(None, ["pick" if way is self.pick else "", self._remark(way)])),
        ]

    def _remark(self, way: Way) -> str:
        if way.fate is Fate.STOPPED:
            return f"stopped early, after {way.steps} step{'s' if way.steps > 1 else ''}"
        if way.fate is Fate.UNFIT:
            return f"does not fit: {way.problem}"
        if way.fate is Fate.WAITING:
            return "not measured: no time left"
        return "" if way.turns else "its first steps: no time for more"

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values; speeds in samples per second, `turns` by round."""
        return {
            "pick": asdict(self.pick.candidate),
            "why": self.why(),
            "seconds": self.seconds,
            "short_trainings": None if self.twins is None else self.twins.as_json(),
            "candidates": [self._record(way) for way in self.rows()],
        }

    def _record(self, way: Way) -> dict[str, Any]:
        return {
            **asdict(way.candidate),
            "fate": way.fate.value,
            "to_choose_from": any(way is one for one in self.ways),
            "samples_per_s": way.rate,
            "spread": way.spread,
            "of_the_pick": self.ratio(way),
            "first_step_s": None if way.first is None else way.first.seconds,
            "steps": way.steps,
            "turns": {str(turn): rate for turn, rate in way.turns.items()},
            "problem": None if way.problem is None else str(way.problem),
        }
