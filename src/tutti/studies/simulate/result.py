"""What a simulation has found: a table, the size at which each way stops paying, a figure. Needs no torch."""

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
"""Twice the workers that are less than this many times as fast do not pay."""

DEAR: Final = 2.0
"""Nor do workers whose samples cost this many times those of the cheapest smaller number."""


@dataclass(frozen=True)
class Row:
    """One way with one number of workers.

    Attributes:
        way: as it was given.
        workers: how many.
        hosts: that they fill.
        samples: trained on, over all workers.
        seconds: that it takes, validation not counted.
        computes: the share of the workers' time in which they compute.
        bytes_per_step: that a worker sends in a step.
        goodput: the share of the work that failures of hosts leave.
        staleness: updates by others between what a gradient was computed from and its use, in the mean.
        cost: of the hosts, in the unit of the price; None: there is no price.
        loss: on the validation part at the end; None: timing alone.
        metrics: likewise, by name.
        error: why this cannot be run; empty: it can.
    """

    way: str
    workers: int
    hosts: int
    samples: int = 0
    seconds: float = 0.0
    computes: float = 0.0
    bytes_per_step: float = 0.0
    goodput: float = 1.0
    staleness: float = 0.0
    cost: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def rate(self) -> float:
        """Samples per second that count."""
        return self.samples * self.goodput / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Simulation:
    """All rows, way by way, by the number of workers."""

    rows: Sequence[Row]

    def by_way(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield each way with its rows, without those that cannot be run."""
        for way, rows in groupby(self.rows, lambda row: row.way):
            yield way, [row for row in rows if not row.error]

    def stops(self) -> dict[str, int | None]:
        """Return the number of workers at which each way stops paying; None: it has not stopped.

        It is the first one to which each doubling adds less than 25 % of speed, or whose samples cost twice
        as much in hosts and hours as those of a smaller number.
        """
        return {way: next(_unpaid(rows), None) for way, rows in self.by_way()}

    def verdict(self) -> list[str]:
        """Return a sentence for each way."""
        said = []
        for way, rows in self.by_way():
            stop = next(_unpaid(rows), None)
            if stop is not None:
                said.append(f"{way} stops paying at {stop:,} workers")
            elif len(rows) > 1:
                said.append(f"{way} still pays at {rows[-1].workers:,} workers")
        return said

    def show(self, stream: IO[str]) -> None:
        """Print the table, and where each way stops paying."""
        columns: dict[str, list[str]] = {}
        names = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        first = {way: rows[0].rate for way, rows in self.by_way() if rows}
        for row in self.rows:
            ran = not row.error
            cells = {
                "strategy": row.way,
                "workers": f"{row.workers:,}",
                "hosts": f"{row.hosts:,}",
                "samples/s": f"{row.rate:,.0f}" if ran else "",
                "speed-up": f"{row.rate / first[row.way]:,.1f}" if ran and first[row.way] else "",
                "seconds": f"{row.seconds:,.1f}" if ran else "",
                "computes": f"{row.computes:.0%}" if ran else "",
                "kB/step": f"{row.bytes_per_step / 1000:,.1f}" if ran else "",
                "goodput": f"{row.goodput:.1%}" if row.goodput < 1 else "",
                "late by": f"{row.staleness:.1f}" if row.staleness else "",
                "cost": "" if row.cost is None else f"{row.cost:,.4g}",
                "loss": "" if row.loss is None else loss_text(row.loss),
                **{
                    name: metric_text(name, row.metrics[name]) if name in row.metrics else ""
                    for name in names
                },
                "remark": row.error,
            }
            for head, cell in cells.items():
                columns.setdefault(head, []).append(cell)
        shown = {head: cells for head, cells in columns.items() if any(cells)}
        table = TextTable([*shown], left=("remark",), drop=("hosts", "kB/step", "seconds", "loss"))
        for row_cells in zip(*shown.values(), strict=True):
            table.add_row(*row_cells)
        console_on(stream).print(table)
        print(*self.verdict(), sep="\n", file=stream, flush=True)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {"rows": [asdict(row) for row in self.rows], "stops": self.stops()}

    def draw(self, path: str) -> None:
        """Draw speed, and accuracy where there is one, against the number of workers.

        Args:
            path: of the picture: .svg, .png or .html.
        """
        import altair as alt

        from tutti.reports.figures.base import HEIGHT, WIDTH, coloured, in_rows, table

        ways = [way for way, _ in self.by_way()]
        metric = next((name for row in self.rows for name in row.metrics), "loss")
        data = [
            {
                "way": way,
                "workers": row.workers,
                "samples/s": row.rate,
                metric: row.metrics.get(metric, row.loss),
            }
            for way, rows in self.by_way()
            for row in rows
        ]
        logarithmic = alt.Scale(type="log", base=2)
        panels = [
            alt.Chart(table(data))
            .mark_line(point=True)
            .encode(
                x=alt.X("workers:Q", scale=logarithmic, axis=alt.Axis(format="d", tickCount=8)),
                y=alt.Y(f"{y}:Q", title=y, scale=logarithmic if y == "samples/s" else alt.Scale(zero=False)),
                **coloured("way", ways, data),
            )
            .properties(width=WIDTH, height=HEIGHT)
            for y in ("samples/s", metric)
            if any(row[y] is not None for row in data)
        ]
        room = {"left": 14, "top": 14, "right": 40, "bottom": 14}
        in_rows(panels, "way").configure(background="#ffffff", padding=room).save(path)


def _unpaid(rows: Sequence[Row]) -> Iterator[int]:
    """Yield the numbers of workers that do not pay."""
    cheapest = rows[0].hosts / rows[0].rate if rows and rows[0].rate else 0.0
    for before, row in pairwise(rows):
        doublings = log2(row.workers / before.workers)
        price = row.hosts / row.rate
        if (row.rate / before.rate) ** (1 / doublings) < WORTH or price >= DEAR * cheapest:
            yield row.workers
        cheapest = min(cheapest, price)
