"""The record of a pipeline: the layers of each rank, its work in one step, its idle time. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tutti.records.json_lines import Record

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
KINDS: Final = (FORWARD, BACKWARD)
"""The kinds of work that a stage does with a microbatch."""

SCHEDULES: Final = ("gpipe", "1f1b")
"""Schedules of a pipeline."""


@dataclass(frozen=True)
class PipelineSpan:
    """The work of a rank's stage on one microbatch; times are seconds since the step's first span began."""

    rank: int
    kind: str
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class PipelineRecord(Record):
    """A pipeline, and one of its steps."""

    schedule: str  # its name
    microbatches: int  # the number of parts of a batch
    layers: list[list[str]]  # the names of each rank's layers
    idle: list[float]  # the share of each rank's time in that step without forward and backward, in [0, 1]
    spans: list[PipelineSpan]  # the work of the ranks in one step, the last whole one

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time."""
        return sum(self.idle) / len(self.idle) if self.idle else 0.0

    def __str__(self) -> str:
        shares = ", ".join(f"rank {rank} {idle:.0%}" for rank, idle in enumerate(self.idle))
        return f"idle for {self.bubble:.1%} of the ranks' time in a step ({shares})"


def since_the_first(spans: list[PipelineSpan]) -> list[PipelineSpan]:
    """Make the times of spans relative to the earliest begin, and sort the spans by them."""
    first = min((span.start for span in spans), default=0.0)
    moved = [replace(span, start=span.start - first, stop=span.stop - first) for span in spans]
    return sorted(moved, key=lambda span: (span.start, span.rank))
