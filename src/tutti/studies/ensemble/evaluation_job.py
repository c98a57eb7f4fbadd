"""The jobs of making an ensemble, evaluating it and predicting with it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tutti.records.ensemble import ENSEMBLE, EnsembleRecord, Member, read_ensemble
from tutti.run.jobs import Job
from tutti.run.train_job import PredictJob
from tutti.run.trust import check as check_trust


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
        whole: the data are others, of which all samples are evaluated if they have no test part.
    """

    entry: ClassVar[str] = "tutti.studies.ensemble.evaluation:work"

    record: EnsembleRecord
    folder: str
    part: str | None
    making: Making | None = None
    whole: bool = False


@dataclass(frozen=True)
class EnsemblePredictJob(PredictJob):
    """The predictions of an ensemble."""

    entry: ClassVar[str] = "tutti.studies.ensemble.evaluation:predict_work"


def read_trusted(folder: Path, trust: bool) -> EnsembleRecord:
    """Read the record of an ensemble.

    Raises:
        BadRunFolder: there is none, or it is damaged.
        Untrusted: it names code, and `trust` is False.
    """
    record = read_ensemble(folder)
    if not trust:
        for member in record.members:
            check_trust(folder / ENSEMBLE, member.config)
    return record
