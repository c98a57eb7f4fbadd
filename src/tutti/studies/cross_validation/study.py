"""A cross-validation on a farm: its question, splits and jobs.

FARM/splits.npz                          the rows of each fold, the same for all candidates
FARM/jobs/MODEL/SCHEDULE/fold-K/         an ordinary run, which 'tutti train --split' repeats
FARM/scores.csv, compare.csv             the results
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tutti.farm.coordinator import FarmOutcome, Listener
from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.farm.work import work_on
from tutti.records.farm_folder import DATA, SPLITS, FarmFolder, JobState
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord
from tutti.records.run_folder import folder_name
from tutti.records.splits import Split, write_splits
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.candidates import servers_of
from tutti.studies.cross_validation.result import KIND, job_name
from tutti.studies.farms import FOLDER, Blocks, keep_data
from tutti.studies.score import AUTO

if TYPE_CHECKING:
    from tutti.studies.samples import Samples  # Imports torch.


@dataclass(frozen=True)
class CrossValidation:
    """The question of a cross-validation."""

    candidates: Mapping[str, FarmJob]  # by name, with the seed of fold 0
    cv: object  # as `make_splits` takes it
    described: Json  # `cv` as JSON values
    groups: str | NDArray[Any] | None = None  # of the samples, or the name of their column or array
    score: str = AUTO  # a `Score` as text
    arrays: Mapping[str, NDArray[Any]] | None = None  # data for the farm to keep, by the keys of an NPZ file

    @property
    def config(self) -> TrainConfig:
        """The configuration of a candidate: all have the same data and seed."""
        return next(iter(self.candidates.values())).config

    def splits(self, samples: Samples) -> list[Split]:
        """Split the samples."""
        from tutti.studies.cross_validation.splits import make_splits  # Imports scikit-learn, for a second.

        groups = samples.groups if isinstance(self.groups, str) else self.groups
        return make_splits(self.cv, samples.targets, groups, samples.rest)

    def jobs(self, folds: int, folder: Path) -> dict[str, list[FarmJob]]:
        """Return the jobs of each candidate in the folder of a farm, one for each fold."""
        return {
            name: [self._job(one, fold, folder) for fold in range(folds)]
            for name, one in self.candidates.items()
        }

    def _job(self, one: FarmJob, fold: int, folder: Path) -> FarmJob:
        # A fold has the same seed for all candidates, so that their scores are paired.
        seed = one.config.seed + fold
        place = f"{folder / SPLITS}:{fold}"
        config = replace(one.config, split=place, test=0.0, seed=seed, predictions=True)
        if self.arrays is not None:
            config = replace(config, data=str(folder / DATA))
        return replace(one, name=job_name(one.name, fold), config=config)

    def begin(
        self, samples: Samples, splits: list[Split], out: str | None, resume: bool = False
    ) -> FarmFolder:
        """Make the folder of the farm with its splits, or continue in an earlier one."""
        record = {
            "candidates": list(self.candidates),
            "data": samples.name,
            **self.described,
            "score": self.score,
            "seed": self.config.seed,
            "labels": list(samples.labels),
            "ratios": [len(split.test) / len(split.train) for split in splits],
            "splits": _digest(splits),
            "fingerprint": samples.fingerprint,
        }
        # The plan has relative paths: the folder may be moved.
        planned = self.jobs(len(splits), Path()).values()
        jobs = {job.name: job.config.as_json() for jobs in planned for job in jobs}
        models = dict.fromkeys(name.partition("/")[0] for name in self.candidates)
        path = out or FOLDER / folder_name("-".join(models), samples.name)
        folder = FarmFolder.begin(path, KIND, record, jobs, resume=resume)
        keep_data(folder, self.arrays)
        if not folder.splits.is_file():
            write_splits(folder.splits, splits, samples.fingerprint, self.config.seed)
        return folder

    def train(self, folder: FarmFolder, blocks: Blocks, listener: Listener | None = None) -> FarmOutcome:
        """Work on all unfinished jobs of the farm."""
        jobs = self.jobs(len(folder.plan.question["ratios"]), folder.path.absolute())
        count, servers = sum(map(len, jobs.values())), servers_of(self.candidates)
        limits = {**vars(blocks), "jobs": count, "servers": servers}
        return work_on(folder, FoldJobs(jobs), **limits, listener=listener)


class FoldJobs:
    """The jobs of all candidates: first one fold of each, then the longest jobs, judging by those."""

    def __init__(self, candidates: Mapping[str, Sequence[FarmJob]]) -> None:
        self._waiting = {name: deque(jobs) for name, jobs in candidates.items()}
        self._candidate = {job.name: name for name, jobs in candidates.items() for job in jobs}
        self._first = deque(self._waiting)
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def next(self) -> FarmJob | None:
        """Return the first fold of the next candidate, then the longest of the rest."""
        if self._first:
            return self._waiting[self._first.popleft()].popleft()
        left = [name for name, jobs in self._waiting.items() if jobs]
        if not left:
            return None
        return self._waiting[max(left, key=self._expected)].popleft()

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Return False: no fold ends early."""
        return False

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note the duration of a job."""
        if outcome.state is JobState.FINISHED and outcome.summary is not None:
            self._seconds[self._candidate[job.name]].append(outcome.summary.seconds)

    def _expected(self, name: str) -> float:
        """Estimate the seconds of a candidate's job: infinity while its first fold runs."""
        known = self._seconds[name]
        return mean(known) if known else float("inf")


def without_groups(config: TrainConfig, groups: object) -> TrainConfig:
    """Return a configuration whose inputs leave out the column `groups`, if that is a name."""
    if not isinstance(groups, str):
        return config
    return replace(config, data_options={**config.data_options, "group": groups})


def _digest(splits: list[Split]) -> str:
    digest = hashlib.sha256()
    for split in splits:
        for part in (split.train, split.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.tobytes())
    return digest.hexdigest()[:16]
