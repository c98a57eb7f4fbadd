"""The jobs of evaluating an ensemble and predicting with it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tutti.errors import BadOption
from tutti.records.ensemble import ENSEMBLE, EnsembleRecord, read_ensemble
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.train_job import PredictJob
from tutti.run.trust import check as check_trust


@dataclass(frozen=True)
class EnsembleJob(Job):
    """The evaluation of an ensemble on the data in `config`."""

    entry: ClassVar[str] = "tutti.studies.ensemble.evaluation:work"

    folder: str  # of the ensemble
    part: str | None  # to evaluate; None: the test part, or all samples of other data without one
    other_data: bool = False  # the data are not those of the members
    trust: bool = False  # the record of the ensemble may name code


@dataclass(frozen=True)
class EnsemblePredictJob(PredictJob):
    """The predictions of an ensemble."""

    entry: ClassVar[str] = "tutti.studies.ensemble.evaluation:predict_work"


def config_of_members(folder: Path, trust: bool, weights: str | None) -> TrainConfig:
    """Return the configuration of the first member of an ensemble; refuse other `weights`."""
    if weights is not None:
        raise BadOption("--weights is for a single network; an ensemble has the weights of its members")
    return TrainConfig.from_json(read_trusted(folder, trust).members[0].config)


def read_trusted(folder: Path, trust: bool) -> EnsembleRecord:
    """Read the record of an ensemble; unless trusted, it names no code."""
    record = read_ensemble(folder)
    if not trust:
        for member in record.members:
            check_trust(folder / ENSEMBLE, member.config)
    return record
