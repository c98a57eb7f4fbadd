"""The job of an evaluation. Needs no torch: the launching process imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from tutti.run.jobs import Job

PARTS: Final = ("test", "validation", "train")
"""The parts of a data set."""


@dataclass(frozen=True)
class EvaluateJob(Job):
    """An evaluation of a trained model: `config` is that of its run, with what is to be different now.

    Attributes:
        folder: the run folder.
        part: one of `PARTS`.
        other_data: `config.data` is other data than the run was trained on.
    """

    entry: ClassVar[str] = "tutti.run.evaluate:work"

    folder: str
    part: str
    other_data: bool = False
