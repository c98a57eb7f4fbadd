"""What a pipeline did: who had which layers, what it did when, and how long it waited. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tutti.records.json_lines import decode

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
INPUTS: Final = "backward to inputs"
WEIGHTS: Final = "backward to weights"
KINDS: Final = (FORWARD, BACKWARD, INPUTS, WEIGHTS)
"""What a stage does with a microbatch."""


@dataclass(frozen=True)
class PipelineSpan:
    """One piece of work.

    Attributes:
        rank: who did it, numbered in the team.
        stage: with which stage.
        kind: one of `KINDS`.
        microbatch: on which microbatch.
        start: when, in seconds since the first piece of the step began.
        stop: when it ended.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class PipelineRecord:
    """A pipeline, and one of its steps.

    Attributes:
        schedule: its name.
        microbatches: into how many a batch is cut.
        owners: the rank of each stage.
        layers: the names of each stage's layers.
        idle: the share of each rank's time in steps that no forward and backward took: the bubble, in [0, 1].
        spans: what the ranks did in one step, the last whole one.
    """

    schedule: str
    microbatches: int
    owners: list[int]
    layers: list[list[str]]
    idle: list[float]
    spans: list[PipelineSpan]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        return sum(self.idle) / len(self.idle) if self.idle else 0.0

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PipelineRecord:
        """The record that `as_json` gave.

        Raises:
            KeyError, TypeError, ValueError: `values` is no such record.
        """
        return decode(cls, values)


def since_the_first(spans: list[PipelineSpan]) -> list[PipelineSpan]:
    """The spans with times that begin at the first of them, in that order."""
    first = min((span.start for span in spans), default=0.0)
    moved = [replace(span, start=span.start - first, stop=span.stop - first) for span in spans]
    return sorted(moved, key=lambda span: (span.start, span.rank))
