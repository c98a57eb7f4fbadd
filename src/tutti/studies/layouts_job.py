"""The job of estimating the memory of layouts. Needs no torch: the launching process imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tutti.run.config import Options
from tutti.run.jobs import Job


@dataclass(frozen=True)
class LayoutsJob(Job):
    """The memory that layouts of a model would need."""

    entry: ClassVar[str] = "tutti.studies.layouts:work"
    announced: ClassVar[bool] = False

    ranks: int
    parallel: str | None  # the layout; None: every layout
    options: Options  # of the layout
