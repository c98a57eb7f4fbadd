"""A cross-validation on a farm: from the question to splits and jobs, and back to scores.

FARM/splits.npz                          the rows of each fold, the same for all candidates
FARM/jobs/MODEL/SCHEDULE/fold-K/         an ordinary run, which 'tutti train --split' repeats
FARM/scores.csv, compare.csv             what came out
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tutti.errors import BadData, BadOption, BadRunFolder
from tutti.farm.block_placement import place_blocks
from tutti.farm.coordinator import FarmOutcome, Listener
from tutti.farm.jobs import FarmJob
from tutti.farm.work import work_on
from tutti.records.farm_folder import DATA, SPLITS, FarmFolder, JobState
from tutti.records.files import make_file, refusing
from tutti.records.json_lines import Json
from tutti.records.npz import npz_bytes, read_npz
from tutti.records.predictions import Predictions
from tutti.records.run import Summary
from tutti.records.run_folder import PREDICTIONS, RunFolder, folder_name
from tutti.records.splits import Split, read_split, write_splits
from tutti.run.config import TrainConfig
from tutti.run.pickled import Pickled
from tutti.run.start import check_files
from tutti.run.train_job import TrainJob
from tutti.studies.blocks import Blocks
from tutti.studies.cross_validation.asked_score import AUTO, LOSS
from tutti.studies.cross_validation.candidates import Contender
from tutti.studies.cross_validation.jobs import FoldJobs
from tutti.studies.cross_validation.samples_job import Samples, SamplesJob, look_at
from tutti.studies.cross_validation.scores import (
    MEASURES,
    Scores,
    computed_scores,
    measure_of,
    score_folds,
    write_scores,
)
from tutti.studies.cross_validation.significance import Difference, compare, write_comparison

KIND: Final = "cv"
"""The kind of a farm."""

SCORES: Final = "scores.csv"
COMPARISON: Final = "compare.csv"

FOLDER: Final = Path("farms")
"""The folder of farms without a path of their own."""

AMOUNTS: Final = ("mse", "l1")
"""The losses by which a single output approaches the class number itself, and is no logit."""

OF_FLAGS: Final = frozenset({"bce"})
"""The losses of labels of 0 or 1."""

OF_FLAGS_ALONE: Final = ("bce",)
"""The losses whose outputs are logits of labels of 0 or 1, for classes, too."""

OF_CLASSES: Final = ("auto", "cross_entropy", "nll")
"""The losses of classes: each output weighs a class, and is no amount."""


def fewest_servers(candidates: Mapping[str, Contender]) -> int:
    """Return the number of ranks of a block that train none of the candidates."""
    return min(one.config.servers for one in candidates.values())


@dataclass(frozen=True)
class CrossValidation:
    """The question of a cross-validation.

    Attributes:
        config: what all candidates have in common; its seed is that of fold 0.
        contenders: the candidates by name.
        cv: what divides the samples, as `make_splits` takes it.
        said: how it divides them, as JSON values.
        groups: of the samples: an array, or the name of a column or array of the data; None: there are none.
        score: "auto", or as `measure_of` takes it; the contenders compute it, if they must.
        arrays: the data, where they are given as such, by the keys of an NPZ file: the farm keeps them.
    """

    config: TrainConfig
    contenders: Mapping[str, Contender]
    cv: object
    said: Json
    groups: str | NDArray[Any] | None = None
    score: str = AUTO
    arrays: Mapping[str, NDArray[Any]] | None = None

    @property
    def grouped_by_column(self) -> bool:
        """Whether the groups are a column of the data's files."""
        return isinstance(self.groups, str) and names_column(self.config.data)

    @property
    def objects(self) -> dict[str, Pickled]:
        """Python objects that were given, by their kind and name, such as "model lenet"."""
        found = dict[str, Pickled]()
        for candidate, one in self.contenders.items():
            model, schedule, *_ = candidate.split("/")
            called = {"model": f"model {model}", "schedule": f"schedule {schedule}"}
            found |= {called.get(field, field): pickled for field, pickled in one.objects.items()}
        return found

    @property
    def servers(self) -> int:
        """The ranks of a block that train no candidate."""
        return fewest_servers(self.contenders)

    def jobs(self, folds: int, folder: Path | None = None) -> dict[str, list[FarmJob]]:
        """Return the jobs of each candidate.

        Args:
            folds: how many there are.
            folder: of the farm; None: the paths in it that configurations have begin there.
        """
        return {name: [self._job(name, fold, folder) for fold in range(folds)] for name in self.contenders}

    def _job(self, name: str, fold: int, folder: Path | None) -> FarmJob:
        one, place = self.contenders[name], folder or Path()
        # The same for all candidates, so that folds can be compared one by one.
        seed = self.config.seed + fold
        config = replace(one.config, split=f"{place / SPLITS}:{fold}", seed=seed, predictions=True)
        if self.arrays is not None:
            config = replace(config, data=str(place / DATA))
        return FarmJob(job_name(name, fold), config, objects=one.objects)


@dataclass(frozen=True)
class Plan:
    """A cross-validation whose samples are known.

    Attributes:
        question: what is to be found out.
        splits: of the samples, the same for all candidates.
        fingerprint: of the samples.
        record: the question as the farm's folder keeps it.
    """

    question: CrossValidation
    splits: list[Split]
    fingerprint: str
    record: Json

    def usual_folder(self) -> Path:
        """Return the folder for a farm that the user gave none for."""
        models = dict.fromkeys(name.partition("/")[0] for name in self.question.contenders)
        return FOLDER / folder_name("-".join(models), self.record["data"])


def job_name(candidate: str, fold: int) -> str:
    """Name the job of a fold, counted from 0."""
    return f"{candidate}/fold-{fold}"


def plan_folds(question: CrossValidation, blocks: Blocks, folds: int) -> Plan:
    """Check the candidates, look at the samples and split them, without torch in this process.

    Args:
        question: what is to be found out.
        blocks: where the candidates are to run.
        folds: how many there will be.

    Raises:
        UserError: a candidate, the data, or how they are to be split is wrong.
    """
    jobs = folds * len(question.contenders)
    placement, _ = place_blocks(blocks.block, blocks.blocks, blocks.threads, jobs, question.servers)
    samples = look_at(samples_job(question, blocks), placement.threads or 1)
    return plan_with(question, samples)


def samples_job(question: CrossValidation, blocks: Blocks) -> SamplesJob:
    """Return the job of checking the candidates and looking at the samples.

    Raises:
        BadOption: a Python file that a candidate names is not there.
    """
    # Arrays are no file yet that could be looked for.
    data = {} if question.arrays is None else {"data": Pickled(b"")}
    trained = []
    for one in question.contenders.values():
        check_files(one.config)
        workers = max(1, blocks.block - one.config.servers)
        config = replace(one.config, workers=str(workers))
        trained.append(TrainJob(config, objects=one.objects | data))
    return SamplesJob(question.config, tuple(trained), blocks.block)


def plan_with(question: CrossValidation, samples: Samples) -> Plan:
    """Split samples that are known.

    Raises:
        UserError: they cannot be split like this.
    """
    from tutti.studies.cross_validation.splits import make_splits  # Imports scikit-learn, for a second.

    _refuse_score(question, samples.targets)
    groups = question.groups
    if question.grouped_by_column:
        groups = samples.groups
    elif isinstance(groups, str):
        groups = read_groups(groups, question.config.data)
    splits = make_splits(question.cv, samples.targets, groups, samples.labels)
    return Plan(question, splits, samples.fingerprint, _record(question, samples, splits))


def begin(plan: Plan, out: str | Path, resume: bool = False) -> FarmFolder:
    """Make the folder of the farm, with its splits; or take up that of an earlier one.

    Raises:
        BadOption: the farm that is there has another plan.
        BadRunFolder: something else is there, or the folder cannot be written.
    """
    # In the plan the file of splits has no place: the folder may be moved.
    planned = plan.question.jobs(len(plan.splits)).values()
    jobs = {job.name: job.config.as_json() for jobs in planned for job in jobs}
    folder = FarmFolder.begin(out, KIND, plan.record, jobs, resume=resume)
    if plan.question.arrays is not None:
        keep_data(folder, plan.question.arrays)
    if not folder.splits.is_file():
        write_splits(folder.splits, plan.splits, plan.fingerprint, plan.question.config.seed)
    return folder


def numbers_of(objects: Mapping[str, Pickled]) -> dict[str, str]:
    """Return the modules and arrays among given objects by their numbers, as fields of a farm's question."""
    if not objects:
        return {}
    # Imports torch, which who gave objects has.
    from tutti.studies.given_weights import numbers_given

    return numbers_given(objects)


def keep_data(folder: FarmFolder, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write data into the folder of a farm, by the keys of an NPZ file, unless they are there.

    Raises:
        BadRunFolder: they cannot be written.
    """
    if not (folder.path / DATA).is_file():
        with refusing(folder.path):
            make_file(folder.path / DATA, npz_bytes(arrays))


def train_folds(
    question: CrossValidation, folder: FarmFolder, blocks: Blocks, listener: Listener | None = None
) -> FarmOutcome:
    """Work on all jobs that have not finished yet.

    Args:
        question: what is to be found out.
        folder: of the farm, which has the splits: whoever planned it need not keep them.
        blocks: the ranks.
        listener: is told of all that happens.

    Raises:
        TuttiError: as `work_on` says.
    """
    jobs = question.jobs(folder.plan.question["jobs_each"], folder.path.absolute())
    return work_on(
        folder,
        FoldJobs(jobs),
        block=blocks.block,
        blocks=blocks.blocks,
        threads=blocks.threads,
        jobs=sum(map(len, jobs.values())),
        servers=question.servers,
        job_timeout_s=blocks.job_timeout_s,
        time_limit_s=blocks.time_limit_s,
        listener=listener,
    )


@dataclass(frozen=True)
class Findings:
    """The findings of a cross-validation, as far as its jobs have come.

    Attributes:
        scores: of each candidate that has any.
        differences: between each two of these.
        labels: the classes' names; empty when unknown.
        failed: the jobs that have failed, with why in one line.
        left: how many jobs are yet to be done.
        seconds: the training time of each candidate's folds.
    """

    scores: dict[str, Scores]
    differences: list[Difference]
    labels: tuple[str, ...]
    failed: dict[str, str]
    left: int
    seconds: dict[str, list[float]]


def findings_of(folder: FarmFolder) -> Findings:
    """Read what has come out, from the folder alone.

    Raises:
        BadRunFolder: it is the folder of no cross-validation, or a file in it is damaged.
        BadData: likewise.
    """
    plan = folder.plan
    if plan.kind != KIND:
        raise BadRunFolder(
            f"{folder.path} is the farm of a '{plan.kind}', and no cross-validation; give one that "
            "'tutti cv' wrote"
        )
    asked, failed, left = plan.question, dict[str, str](), 0
    splits = splits_of(folder, asked)
    seconds, losses = dict[str, list[float]](), dict[str, str]()
    predicted = dict[str, list[Predictions | None]]()
    summaries = dict[str, list[Summary | None]]()
    for name in asked["candidates"]:
        found = predicted[name] = []
        said = summaries[name] = []
        seconds[name] = []
        for number in range(asked["jobs_each"]):
            job = job_name(name, number)
            state, run = folder.state(job), RunFolder(folder.job(job))
            if state is JobState.FINISHED:
                found.append(predictions_of(run, splits[number]))
                summary = run.read(Summary)
                said.append(summary)
                seconds[name].append(summary.seconds)
                losses[name] = str(run.config().get("loss"))
                continue
            found.append(None)
            said.append(None)
            if state is JobState.FAILED:
                failed[job] = (folder.error(job) or "").strip().rpartition("\n")[2]
            else:
                left += 1
    score = "accuracy" if asked["score"] == AUTO and of_labels(predicted, losses) else asked["score"]
    scores = {
        name: computed_scores(
            predicted[name],
            score,
            [_computed(score, one) for one in summaries[name]],
            asked["classes"],
            loss in AMOUNTS,
        )
        if score != AUTO and measure_of(score).computed
        else score_folds(predicted[name], score, asked["classes"], loss in AMOUNTS, loss in OF_FLAGS_ALONE)
        for name, loss in losses.items()
    }
    ratios = ratios_of(splits)
    return Findings(scores, compare(scores, ratios), tuple(asked["labels"]), failed, left, seconds)


def _computed(score: str, run: Summary | None) -> float:
    """Return what a run has computed on what it holds out; NaN: there is no run.

    Raises:
        BadRunFolder: it has not computed that.
    """
    if run is None:
        return math.nan
    name, found = score.partition(":")[0], run.validation
    values = {} if found is None else {**found.metrics, LOSS: found.loss}
    if name not in values:
        raise BadRunFolder(
            f"a run has computed {', '.join(values) or 'nothing'} on what it holds out, and not the score "
            f"'{name}'; begin anew, in another folder"
        )
    return values[name]


def predictions_of(run: RunFolder, split: Split) -> Predictions:
    """Read the predictions of a fold.

    Raises:
        BadRunFolder: they are of other samples than those that it holds out.
        BadData: they cannot be read.
    """
    path = run.path / PREDICTIONS
    found = Predictions.read(path)
    if not np.array_equal(found.rows, split.test):
        raise BadRunFolder(
            f"{path} is of other samples than those that this fold holds out; put back the one that belongs "
            "there, or delete that folder and go on with --resume"
        )
    return found


def of_labels(predicted: Mapping[str, Sequence[Predictions | None]], losses: Mapping[str, str]) -> bool:
    """Tell whether float targets are labels of 0 or 1, as a candidate with logits of them says."""
    known = [one.targets for name in losses for one in predicted[name] if one is not None]
    return not OF_FLAGS.isdisjoint(losses.values()) and all(
        np.isin(targets, (0, 1)).all() for targets in known
    )


def write_findings(folder: FarmFolder, found: Findings) -> None:
    """Write the tables of scores and of differences.

    Raises:
        BadRunFolder: they cannot be written.
    """
    write_scores(folder.path / SCORES, found.scores, found.labels)
    write_comparison(folder.path / COMPARISON, found.differences)


def best_first(found: Findings) -> list[str]:
    """Return the candidates that have scores, the best mean first; those with a score of all folds before."""

    def place(name: str) -> tuple[bool, bool, float]:
        one = found.scores[name]
        sign = -1 if measure_of(one.metric).better == "higher" else 1
        # What diverges on the hard folds looks good on the others. NaN has no place in an order.
        return bool(one.missing), math.isnan(one.mean), sign * one.mean

    return sorted(found.scores, key=place)


def names_column(data: str) -> bool:
    """Return whether the groups of data are a column of their files, and no array of an NPZ file."""
    return not data.endswith(".npz") and ("://" in data or "{" in data or Path(data).expanduser().exists())


def without_groups(config: TrainConfig, groups: str | None) -> TrainConfig:
    """Return a configuration whose inputs leave out the column by which samples are grouped."""
    if groups is None or not names_column(config.data):
        return config
    return replace(config, data_options={**config.data_options, "group": groups})


def read_groups(key: str, data: str) -> NDArray[Any]:
    """Read the group of each sample from the NPZ file of the data.

    Raises:
        BadData: there are no such groups.
    """
    found = read_npz(Path(data).expanduser(), [key]) if data.endswith(".npz") else {}
    if key not in found:
        raise BadData(
            f"{data} has no array '{key}' with the group of each sample (--group-by); name one that it has, "
            "or give an array of groups to tutti.cross_validate"
        )
    return found[key]


def _refuse_score(question: CrossValidation, targets: NDArray[Any]) -> None:
    """Refuse a figure of classes for amounts, or of amounts for classes, before anything is trained."""
    score, flags = question.score, targets.dtype.kind == "f" and np.isin(targets, (0, 1)).all()
    if score != AUTO and measure_of(score).computed:
        return
    of_amounts = score != AUTO and not MEASURES[score].of_classes
    if targets.dtype.kind in "iu":
        losses = {one.config.loss for one in question.contenders.values()}
        if of_amounts and not losses.isdisjoint(OF_CLASSES):
            raise BadOption(
                f"--score {score} is for amounts, and the targets are classes; use accuracy, "
                "balanced_accuracy, f1 or top5, or a --loss of amounts, such as mse"
            )
        return
    if score == AUTO or of_amounts or (flags and score != "top5"):
        return
    raise BadOption(f"--score {score} is for classes, and the targets are floats; use mae, mse or r2")


def _record(question: CrossValidation, samples: Samples, splits: list[Split]) -> Json:
    """Return the question as JSON values: who resumes it must ask the same."""
    return {
        "candidates": list(question.contenders),
        "data": samples.name,
        **question.said,
        "score": question.score,
        "seed": question.config.seed,
        "samples": len(samples.targets),
        "classes": samples.classes,
        "labels": list(samples.labels),
        "jobs_each": len(splits),
        "splits": _digest(splits, samples.fingerprint),
        "fingerprint": samples.fingerprint,
        **numbers_of(question.objects),
    }


def _digest(splits: list[Split], fingerprint: str) -> str:
    found = hashlib.sha256(fingerprint.encode())
    for split in splits:
        for part in (split.train, split.test):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part.tobytes())
    return found.hexdigest()[:16]


def splits_of(folder: FarmFolder, asked: Json) -> list[Split]:
    """Read the samples of each fold.

    Raises:
        BadData: they cannot be read, or are of other data.
    """
    return [
        read_split(folder.splits, number, asked["samples"], asked["fingerprint"])
        for number in range(asked["jobs_each"])
    ]


def ratios_of(splits: Sequence[Split]) -> list[float]:
    """Return of each fold the held-out samples / those that it trains on."""
    return [len(split.test) / len(split.train) for split in splits]
