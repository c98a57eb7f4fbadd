"""The figures of a report, as altair charts, from records alone. A file here is a family of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tutti.records.comparison import APART, STRONG, WEAK
from tutti.reports.figures import classes, learning, machine, pipeline, speed, stages
from tutti.reports.figures.base import Picture
from tutti.reports.results import Results

IDEAL: Final = (
    "Speed-up is that over one process with one thread, efficiency is speed-up / cores; dashed is the ideal. "
    "Vertical lines are the spread of the repeats."
)


def _nothing(_: Results) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        title: what stands above it.
        draw: the chart; None where the records have nothing to draw.
        says: sentences below it.
    """

    title: str
    draw: Callable[[Results], Picture]
    says: Callable[[Results], Sequence[str]] = _nothing


FIGURES: Final[dict[str, Figure]] = {
    "progress": Figure("Learning, against time and against epochs", learning.progress, learning.left_out),
    "time-to-target": Figure("Time to the target", learning.to_target, learning.missed),
    "speed-up": Figure("Speed-up and efficiency of these runs", speed.SCALED[APART], lambda _: [IDEAL]),
    "strong-scaling": Figure(
        "Speed-up and efficiency, strong scaling", speed.SCALED[STRONG], lambda _: [IDEAL]
    ),
    "weak-scaling": Figure("Speed-up and efficiency, weak scaling", speed.SCALED[WEAK], lambda _: [IDEAL]),
    "throughput": Figure("Throughput", speed.throughput),
    "latency": Figure("Time of an epoch", speed.latency),
    "stages": Figure("Where the time went", stages.stages, stages.advised),
    "pipeline": Figure("One step of the pipeline", pipeline.lanes, pipeline.bubbles),
    "staleness": Figure("Staleness", stages.staleness),
    "cores": Figure("How busy the cores were", machine.cores),
    "memory": Figure("Memory", machine.memory),
    "trade": Figure("Accuracy against throughput", learning.trade),
    "classes": Figure("Accuracy of each class", classes.accuracies),
    "confusion": Figure("What was taken for what", classes.confusion),
}
"""By the name of its file, in the order of the page."""
