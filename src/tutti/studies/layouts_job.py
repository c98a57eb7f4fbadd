"""The job of estimating memory by layout. Needs no torch: the launching process imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tutti.run.config import Options
from tutti.run.jobs import Job


@dataclass(frozen=True)
class LayoutsJob(Job):
    """The memory that layouts of a model would need.

    Attributes:
        ranks: the number of ranks.
        parallel: the layout; None: every one.
        options: the options of the layout.
    """

    entry: ClassVar[str] = "tutti.studies.layouts:work"
    announced: ClassVar[bool] = False

    ranks: int
    parallel: str | None
    options: Options
