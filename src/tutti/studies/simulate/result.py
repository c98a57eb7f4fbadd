"""The result of a simulation: a table, a figure, and where each way stops paying. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from math import log2
from typing import IO, Any, Final

from tutti.records.texts import loss_text, metric_text
from tutti.tables import TextTable
from tutti.terminal import console_on

WORTH: Final = 1.25
"""Twice the workers pay if they are this many times as fast."""

DEAR: Final = 2.0
"""Workers do not pay if a sample costs this many times as much as with the cheapest smaller number."""


@dataclass(frozen=True)
class SimulatedRow:
    """One way to train with one number of workers."""

    way: str
    workers: int
    hosts: int
    samples: int = 0  # over all workers
    seconds: float = 0.0  # without failures and validation
    computes: float = 0.0  # the share of the workers' time in which they compute
    bytes_per_step: float = 0.0  # that a worker sends
    staleness: float = 0.0  # the mean number of updates by others between a gradient's weights and its use
    goodput: float = 1.0  # the share of the steps that failures of hosts leave
    cost: float | None = None  # of the hosts, in the unit of the price; None: the price is unknown
    loss: float | None = None  # final, on the validation part; None: timing alone
    metrics: dict[str, float] = field(default_factory=dict)  # final, on the validation part
    error: str = ""  # why it was not simulated
    steps: int = 0  # of each worker

    @property
    def rate(self) -> float:
        """Samples per second, in steps that failures leave."""
        return self.samples * self.goodput / self.seconds if self.seconds else 0.0

    def brief(self) -> str:
        """Return the speed and the metrics, or the error."""
        metrics = (f"{name} {metric_text(name, value)}" for name, value in self.metrics.items())
        return self.error or ", ".join([f"{self.rate:,.0f} samples/s", *metrics])

    def cells(self, first: float) -> dict[str, str]:
        """Return the cells of the table by their heads; `first` is the rate of the table's first row."""
        found = {"strategy": self.way, "workers": f"{self.workers:,}", "hosts": f"{self.hosts:,}"}
        found |= {
            "samples/s": f"{self.rate:,.0f}",
            "speed-up": f"{self.rate / first:,.1f}" if first else "",
            "steps": f"{self.steps:,}" if self.steps else "",
            "seconds": f"{self.seconds:,.4g}",
            "ms/step": f"{1e3 * self.seconds / self.steps:,.4g}" if self.steps else "",
            "computes": f"{self.computes:.0%}",
            "kB/step": f"{self.bytes_per_step / 1000:,.1f}",
            "late by": f"{self.staleness:.1f}" if self.staleness else "",
            "goodput": f"{self.goodput:.1%}" if self.goodput < 1 else "",
            "cost": "" if self.cost is None else f"{self.cost:,.4g}",
            "loss": "" if self.loss is None else loss_text(self.loss),
        }
        return found | {name: metric_text(name, value) for name, value in self.metrics.items()}


@dataclass(frozen=True)
class Simulation:
    """All rows, by way and number of workers."""

    rows: Sequence[SimulatedRow]
    assumed: str = ""

    def by_way(self) -> dict[str, list[SimulatedRow]]:
        """Return the rows of each way that were simulated."""
        ways = groupby(self.rows, lambda row: row.way)
        return {way: [row for row in rows if not row.error] for way, rows in ways}

    def stops(self) -> dict[str, int | None]:
        """Return the number of workers at which each way stops paying; None: all numbers pay.

        It is the first number for which each doubling adds less than 25 % of speed, or samples cost twice as
        much, in hosts times seconds, as for a smaller number.
        """
        return {way: next(_unpaid(rows), None) for way, rows in self.by_way().items()}

    def show(self, stream: IO[str]) -> None:
        """Print the table, the rows with errors, and where each way stops paying."""
        ways = self.by_way()
        ran = [row for row in self.rows if not row.error]
        cells = [row.cells(ran[0].rate) for row in ran]
        heads = [head for head in max(cells, key=len) if any(row.get(head) for row in cells)]
        table = TextTable(heads, drop=("hosts", "seconds", "kB/step", "loss"))
        for texts in cells:
            table.add_row(*(texts.get(head, "") for head in heads))
        console_on(stream).print(table)
        if self.assumed:
            print(self.assumed, file=stream)
        refused: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.error:
                refused.setdefault((row.way, row.error), []).append(f"{row.workers:,}")
        for (way, error), workers in refused.items():
            print(f"not simulated: {way} with {', '.join(workers)} workers: {error}", file=stream)
        for way, stop in self.stops().items():
            if len(ways[way]) < 2:
                continue
            pays = f"pays up to {ways[way][-1].workers:,} workers, the largest simulated number"
            print(way, pays if stop is None else f"stops paying at {stop:,} workers", file=stream)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {"assumed": self.assumed, "rows": [asdict(row) for row in self.rows], "stops": self.stops()}

    def draw(self, path: str) -> None:
        """Draw speed and accuracy (or the loss) against workers, as an .svg, .png or .html file."""
        import altair as alt

        from tutti.reports.figures.base import HEIGHT, TICKS, WIDTH, coloured, in_rows, table, upwards

        metric = next((name for row in self.rows for name in row.metrics), "loss")
        ran = [row for row in self.rows if not row.error]
        data = [
            {"way": one.way, "workers": one.workers, "samples/s": one.rate}
            | {metric: one.metrics.get(metric, one.loss)}
            for one in ran
        ]
        workers = alt.Axis(format="d", tickCount=8, labelFlush=False)
        x = alt.X("workers:Q", scale=alt.Scale(type="log", base=2), axis=workers)
        rate = alt.Y("samples/s:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=TICKS))
        panels = [
            alt.Chart(table(data))
            .mark_line(point=True)
            .encode(x=x, y=y, **coloured("way", self.by_way(), data))
            .properties(width=WIDTH, height=HEIGHT)
            for name, y in (("samples/s", rate), (metric, upwards(data, metric, metric)))
            if any(row[name] is not None for row in data)
        ]
        chart = in_rows(panels, "way").configure(background="#ffffff", padding=14)
        chart.configure_legend(columnPadding=18).save(path)


def _unpaid(rows: Sequence[SimulatedRow]) -> Iterator[int]:
    """Yield the numbers of workers that do not pay."""
    for number, (before, row) in enumerate(pairwise(rows)):
        if not (before.rate and row.rate):  # Failures leave no step.
            yield row.workers
            return
        gain = (row.rate / before.rate) ** (1 / log2(row.workers / before.workers))
        cheapest = min(one.hosts / one.rate for one in rows[: number + 1])
        if gain < WORTH or row.hosts / row.rate >= DEAR * cheapest:
            yield row.workers
