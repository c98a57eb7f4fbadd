"""The job of making an ensemble and evaluating it. Needs no torch: the launching process has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tutti.records.ensemble import EnsembleRecord, Member
from tutti.run.jobs import Job


@dataclass(frozen=True)
class Making:
    """The parts of an ensemble that is to be made.

    Attributes:
        places: where the weights of its members are.
        singles: the networks that it is compared with, each with the place of its weights.
        metric: that they are compared by.
    """

    places: tuple[str, ...]
    singles: tuple[tuple[Member, str], ...]
    metric: str


@dataclass(frozen=True)
class EnsembleJob(Job):
    """The evaluation of an ensemble: `config` says with which data.

    Attributes:
        record: what the ensemble is.
        folder: of the ensemble.
        part: that is to be evaluated; None: the test part, if there is one.
        making: write it first; None: it is there.
    """

    entry: ClassVar[str] = "tutti.studies.ensemble.evaluation:work"

    record: EnsembleRecord
    folder: str
    part: str | None
    making: Making | None = None
