"""The findings of a plan, and their report: a table, and the reasons. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final

from rich import box
from rich.table import Table

from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.race import Contender, Fate, equals, gap, leader, racing
from tutti.terminal import console_on

Way = Contender[Candidate]
"""A way to train, and what was measured of it."""

HEADS: Final = ("ranks", "threads", "precision", "layout", "batch", "samples/s", "spread", "of the pick", "")


@dataclass(frozen=True)
class Recommendation:
    """The measurements, and what to take.

    Attributes:
        ways: those to choose from.
        others: further ones that were measured against the pick: other precisions, which change the numbers.
        seconds: that all of it took, the start of the ranks included.
    """

    ways: Sequence[Way]
    others: Sequence[Way] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def pick(self) -> Way:
        """The fastest; of those that are as fast within the noise, the simplest."""
        return min(equals(self.ways), key=lambda way: way.candidate.complexity)

    def why(self) -> list[str]:
        """The reason for the pick, and what other numbers would bring, one sentence each."""
        return [self._reason(), *self._alternative()]

    def _reason(self) -> str:
        pick = self.pick
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

    def _alternative(self) -> list[str]:
        """The best of the other precisions, if it is surely faster than the pick."""
        reference = self._reference()
        if reference is None or not racing(self.others):
            return []
        best = leader(self.others)
        to = gap(best, reference)
        if best is reference or len(best.turns) < 2 or to.ratio - to.noise <= 1:
            return []
        precision = best.candidate.precision
        return [
            f"{precision} rounds more, so it is not chosen: {self._name(best)} in {precision} would be "
            f"{to.ratio:.2f} times as fast (--precisions {self.pick.candidate.precision},{precision} lets "
            "the plan choose it; compare the accuracy)"
        ]

    def _reference(self) -> Way | None:
        """The pick, as it was measured beside the other precisions."""
        candidate = self.pick.candidate
        return next((way for way in self.others if way.candidate == candidate and way.rate), None)

    def ratio(self, way: Way) -> float | None:
        """The speed of a way / that of the pick, from the rounds that both took part in; None: unknown."""
        reference = self.pick if any(way is one for one in self.ways) else self._reference()
        return None if way.rate is None or reference is None else gap(way, reference).ratio

    def rows(self) -> list[Way]:
        """All ways, the fastest first, and those that were not measured last."""
        further = [way for way in self.others if way.candidate != self.pick.candidate]
        return sorted([*self.ways, *further], key=lambda way: -(self.ratio(way) or 0.0))

    def show(self, stream: IO[str]) -> None:
        """Print the table."""
        table = Table(box=box.SIMPLE_HEAD)
        for head in HEADS:
            side: Any = "left" if head in ("precision", "layout", "") else "right"
            table.add_column(head, justify=side, no_wrap=bool(head))
        for way in self.rows():
            table.add_row(*self.cells(way), style="bold" if way is self.pick else None)
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
