"""A cross-validation on a farm: question, splits and jobs, and the findings in its folder.

FARM/splits.npz                          the rows of each fold, the same for all candidates
FARM/jobs/MODEL/SCHEDULE/fold-K/         an ordinary run, which 'tutti train --split' repeats
FARM/scores.csv, compare.csv             what came out
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData, BadRunFolder, UnknownName
from tutti.farm.coordinator import FarmOutcome, Listener
from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.farm_folder import DATA, SPLITS, FarmFolder, JobState
from tutti.records.json_lines import Json
from tutti.records.npz import read_npz
from tutti.records.predictions import Predictions
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import PREDICTIONS, RunFolder, folder_name
from tutti.records.splits import Split, write_splits
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.candidates import servers_of
from tutti.studies.cross_validation.scores import FoldScores, best_first, write_scores
from tutti.studies.cross_validation.significance import Difference, compare, write_comparison
from tutti.studies.farms import FOLDER, Blocks, keep_data
from tutti.studies.score import Score, score_by_metrics

if TYPE_CHECKING:
    from tutti.studies.samples import Samples  # Imports torch.

KIND: Final = "cv"
"""The kind of a farm."""

SCORES: Final = "scores.csv"
COMPARISON: Final = "compare.csv"

AUTO: Final = "auto"


@dataclass(frozen=True)
class CrossValidation:
    """The question of a cross-validation.

    Attributes:
        candidates: what is trained on each fold, by name; the seed of each is that of fold 0.
        cv: what divides the samples, as `make_splits` takes it.
        described: how it divides them, as JSON values.
        groups: of the samples: an array, or the name of a column or array of the data; None: there are none.
        score: a `Score` as text, which all candidates compute; "auto": the first of their metrics.
        arrays: the data, where they are given as such, by the keys of an NPZ file: the farm keeps them.
    """

    candidates: Mapping[str, FarmJob]
    cv: object
    described: Json
    groups: str | NDArray[Any] | None = None
    score: str = AUTO
    arrays: Mapping[str, NDArray[Any]] | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration of one candidate: data and seed are those of all."""
        return next(iter(self.candidates.values())).config

    def splits(self, samples: Samples) -> list[Split]:
        """Split samples that are known.

        Raises:
            UserError: they cannot be split like this.
        """
        from tutti.studies.cross_validation.splits import make_splits  # Imports scikit-learn, for a second.

        groups = self.groups
        if isinstance(groups, str):
            groups = read_groups(groups, self.config.data) if samples.groups is None else samples.groups
        return make_splits(self.cv, samples.targets, groups)

    def jobs(self, folds: int, folder: Path) -> dict[str, list[FarmJob]]:
        """Return the jobs of each candidate for a number of folds, in a folder of a farm."""
        return {
            name: [self._job(one, fold, folder) for fold in range(folds)]
            for name, one in self.candidates.items()
        }

    def _job(self, one: FarmJob, fold: int, folder: Path) -> FarmJob:
        # The same seed for all candidates, so that folds can be compared one by one.
        seed = one.config.seed + fold
        config = replace(one.config, split=f"{folder / SPLITS}:{fold}", seed=seed, predictions=True)
        if self.arrays is not None:
            config = replace(config, data=str(folder / DATA))
        return replace(one, name=job_name(one.name, fold), config=config)

    def begin(
        self, samples: Samples, splits: list[Split], out: str | None, resume: bool = False
    ) -> FarmFolder:
        """Make the folder of the farm, with its splits; or take up that of an earlier one.

        Raises:
            BadOption: the farm that is there has another plan.
            BadRunFolder: something else is there, or the folder cannot be written.
        """
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
        # The paths of its files are relative in the plan: the folder may be moved.
        planned = self.jobs(len(splits), Path()).values()
        jobs = {job.name: job.config.as_json() for jobs in planned for job in jobs}
        folder = FarmFolder.begin(out or self.usual_folder(samples), KIND, record, jobs, resume=resume)
        keep_data(folder, self.arrays)
        if not folder.splits.is_file():
            write_splits(folder.splits, splits, samples.fingerprint, self.config.seed)
        return folder

    def usual_folder(self, samples: Samples) -> Path:
        """Return the folder for a farm that the user gave none for."""
        models = dict.fromkeys(name.partition("/")[0] for name in self.candidates)
        return FOLDER / folder_name("-".join(models), samples.name)

    def train(self, folder: FarmFolder, blocks: Blocks, listener: Listener | None = None) -> FarmOutcome:
        """Work on all jobs in a farm's folder that have not finished yet."""
        jobs = self.jobs(len(folder.plan.question["ratios"]), folder.path.absolute())
        count = sum(map(len, jobs.values()))
        return blocks.work(folder, FoldJobs(jobs), count, servers_of(self.candidates), listener)


class FoldJobs:
    """The jobs of all folds of all candidates: first one of each, then the longest, by what those have taken.

    Args:
        candidates: the jobs of each, by name.
    """

    def __init__(self, candidates: Mapping[str, Sequence[FarmJob]]) -> None:
        self._waiting = {name: deque(jobs) for name, jobs in candidates.items()}
        self._candidate = {job.name: name for name, jobs in candidates.items() for job in jobs}
        self._first = deque(self._waiting)
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def next(self) -> FarmJob | None:
        """Return the first fold of the next candidate; of what is left then the longest."""
        if self._first:
            return self._waiting[self._first.popleft()].popleft()
        left = [name for name, jobs in self._waiting.items() if jobs]
        if not left:
            return None
        return self._waiting[max(left, key=self._expected)].popleft()

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Let the job go on."""
        return False

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Note how long it has taken."""
        if outcome.state is JobState.FINISHED and outcome.summary is not None:
            self._seconds[self._candidate[job.name]].append(outcome.summary.seconds)

    def _expected(self, name: str) -> float:
        """The seconds of a job of a candidate; of one whose first fold still runs, more than any."""
        known = self._seconds[name]
        return mean(known) if known else float("inf")


def job_name(candidate: str, fold: int) -> str:
    """Name the job of a fold, counted from 0."""
    return f"{candidate}/fold-{fold}"


@dataclass(frozen=True)
class CrossValidated:
    """The result of `tutti.cross_validate`; printed, it is the table of scores with the comparison in words.

    Attributes:
        scores: of each candidate that has any, by name, such as "lenet/cosine": those of its folds, their
            mean and deviation, and the confusion of classes.
        comparison: of each two candidates, in words: `sentence`.
        failed: the jobs that have failed, with why in one line.
        folder: of the farm, which has all runs and the tables.
        labels: the classes' names; empty when unknown.
        left: how many jobs are yet to be done.
    """

    scores: dict[str, FoldScores]
    comparison: list[Difference] = field(repr=False)
    failed: dict[str, str]
    folder: Path
    labels: tuple[str, ...] = field(default=(), repr=False)
    left: int = 0

    @classmethod
    def read(cls, folder: FarmFolder) -> CrossValidated:
        """Read the result from the folder of a farm, as far as its jobs have come.

        Raises:
            BadRunFolder: it is the folder of no cross-validation, or a file in it is damaged.
        """
        question = question_of(folder)
        failed, left = dict[str, str](), 0
        runs = dict[str, list[Summary | None]]()
        for name in question["candidates"]:
            runs[name] = []
            for fold in range(len(question["ratios"])):
                job = job_name(name, fold)
                state = folder.state(job)
                finished = state is JobState.FINISHED
                runs[name].append(RunFolder(folder.job(job)).read(Summary) if finished else None)
                if state is JobState.FAILED:
                    failed[job] = (folder.error(job) or "").strip().rpartition("\n")[2]
                elif not finished:
                    left += 1
        known = [one.validation for found in runs.values() for one in found if one and one.validation]
        score = score_by_metrics(known) if question["score"] == AUTO else Score.read(question["score"])
        scores = {name: FoldScores.of(score, found) for name, found in runs.items() if any(found)}
        comparison = compare(scores, question["ratios"])
        return cls(scores, comparison, failed, folder.path, tuple(question["labels"]), left)

    @property
    def best(self) -> str:
        """The candidate with the best mean, of those with a score of each fold if there are any.

        The comparison says whether the difference is significant.
        """
        return best_first(self.scores)[0]

    def predictions(self, name: str) -> Predictions:
        """Return the predictions of a candidate for all samples that were held out, in their order.

        With repeats there is one for each time that a sample was held out.

        Args:
            name: of the candidate.

        Raises:
            UnknownName: it has none.
        """
        if name not in self.scores:
            raise UnknownName("candidate", name, self.scores)
        folder = FarmFolder.open(self.folder)
        jobs = [folder.job(job_name(name, fold)) for fold in range(len(self.scores[name].folds))]
        found = [Predictions.read(job / PREDICTIONS) for job in jobs if (job / PREDICTIONS).is_file()]
        rows, outputs, targets = (
            np.concatenate([getattr(one, part) for one in found]) for part in ("rows", "outputs", "targets")
        )
        order = np.argsort(rows, kind="stable")
        return Predictions(rows[order], outputs[order], targets[order])

    def __str__(self) -> str:
        from tutti.studies.cross_validation.display import print_scores

        text = StringIO()
        print_scores(self, text)
        return text.getvalue().rstrip()

    def write_tables(self) -> None:
        """Write the tables of scores and of differences."""
        write_scores(self.folder / SCORES, self.scores, self.labels)
        write_comparison(self.folder / COMPARISON, self.comparison)


def question_of(folder: FarmFolder) -> Json:
    """Return the question of a cross-validation, as `CrossValidation.begin` has recorded it."""
    if folder.plan.kind != KIND:
        raise BadRunFolder(
            f"{folder.path} is the farm of a '{folder.plan.kind}', and no cross-validation; give one that "
            "'tutti cv' wrote"
        )
    return folder.plan.question


def without_groups(config: TrainConfig, groups: object) -> TrainConfig:
    """Return a configuration whose inputs leave out the column by which samples are grouped."""
    if not isinstance(groups, str) or config.data.endswith(".npz"):
        return config
    return replace(config, data_options={**config.data_options, "group": groups})


def read_groups(key: str, data: str) -> NDArray[Any]:
    """Read the group of each sample from the NPZ file of the data."""
    found = read_npz(Path(data).expanduser(), [key]) if data.endswith(".npz") else {}
    if key not in found:
        raise BadData(
            f"{data} has no array '{key}' with the group of each sample (--group-by); name one that it has, "
            "or give an array of groups to tutti.cross_validate"
        )
    return found[key]


def _digest(splits: list[Split]) -> str:
    found = hashlib.sha256()
    for split in splits:
        for part in (split.train, split.test):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part.tobytes())
    return found.hexdigest()[:16]
