"""`tutti cv`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table
from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, config_from, sweep_of
from tutti.errors import EXIT_INTERRUPTED, BadOption, UnknownName
from tutti.farm.coordinator import EpochEnded, FarmOutcome, Happening, JobBegan, JobEnded
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.run_folder import ERROR, folder_name
from tutti.records.texts import duration
from tutti.records.untrusted import printable
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.cross_validation.candidates import (
    NONE,
    NOT_SWEPT,
    choices_of,
    contenders,
    refuse_own_folds,
)
from tutti.studies.cross_validation.scores import MEASURES, Scores
from tutti.studies.cross_validation.splits import splitter_of
from tutti.studies.cross_validation.study import (
    COMPARISON,
    SCORES,
    Blocks,
    CrossValidation,
    Findings,
    Plan,
    begin,
    best_first,
    findings_of,
    plan_folds,
    train_folds,
    write_findings,
)
from tutti.terminal import console_on
from tutti.training.intervals import seconds_of
from tutti.watching.farm import FarmDisplay, FarmProgress, known_jobs

FOLDER = Path("farms")
"""Where farms go that the user gave no folder for."""


@part("cv")
class CvCommand(Command):
    """Cross-validate models and schedules, many folds at once: which is best?

    Each model with each schedule is trained on the same folds, several at a time on the cores of this
    machine. Shows the scores on what each fold holds out, and which differences can be told.
    """

    example = "tutti cv lenet,mlp --data mnist --folds 5 --schedule none,cosine --epochs 3 --stratified"

    @override
    def define(self, parser: Parser) -> None:
        models = "models with commas, each as for 'tutti train' (default: cnn)"
        parser.add_argument("models", metavar="MODELS", nargs="?", default="cnn", help=models)
        parser.option("--folds", "parts that are held out in turn", "K", 5, type=int)
        repeats = "how often all samples are divided, each time in another way"
        parser.option("--repeats", repeats, "N", 1, type=int)
        parser.option("--stratified", "each fold has the same share of each class")
        parser.option(
            "--group-by",
            "keep samples of one group in one fold: the name of an array of the data's NPZ file, or FILE.npy",
            "NAME",
        )
        schedules = "schedules with commas, each as for 'tutti train', or none"
        parser.option("--schedule", schedules, "NAMES", NONE, dest="schedules")
        parser.option(
            "--sweep",
            "cross in an option of 'tutti train', such as lr=0.01,0.001 or model.hidden=64,128; may be given "
            "several times",
            "KEY=VALUES",
            [],
            action="append",
        )
        scores = f"the figure that candidates are compared by: auto, {', '.join(MEASURES)}"
        parser.option("--score", scores, "NAME", "auto")
        parser.option("--classes", "show the accuracy of each class")
        parser.option("--block", "ranks of each run", "B", 1, type=int)
        blocks = "runs at a time (default: as many as the cores allow, and no more than help)"
        parser.option("--blocks", blocks, "N", type=int)
        threads = "threads of each rank (default: the cores / the ranks)"
        parser.option("--threads", threads, "N", type=int)
        timeout = "give a run up that is not done after such a time, such as 10m"
        parser.option("--job-timeout", timeout, "TIME")
        limit = "save and stop when so much time is over, such as 2h; --resume goes on"
        parser.option("--time-limit", limit, "TIME")
        out = "folder of all runs and results (default: farms/DATE-MODELS-DATA)"
        parser.option("--out", out, "FOLDER")
        parser.option("--resume", "go on in --out: what has finished there is kept")
        parser.option("--dry-run", "look at the data, print the runs and end")
        parser.config_options(leave_out=[*({*NOT_SWEPT} - {"data", "data_options", "seed"}), "schedule"])
        parser.fields.append("schedule_options")
        parser.dotted.append("schedule_options")

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Train all folds and print what can be told. The exit code is 1 when a fold has failed."""
        config = config_from(given, dotted)
        refuse_own_folds(config)
        if own.resume and own.out is None:
            raise BadOption("--resume needs --out: the folder of the cross-validation to go on with")
        if own.score != "auto" and own.score not in MEASURES:
            raise UnknownName("value", own.score, ["auto", *MEASURES], of="--score")
        models = choices_of("model", _listed(own.models))
        schedules = choices_of("schedule", _listed(own.schedules))
        grouped = own.group_by is not None
        splitter = splitter_of(own.folds, own.repeats, config.seed, own.stratified, grouped)
        said = {"folds": own.folds, "repeats": own.repeats, "stratified": own.stratified}
        question = CrossValidation(
            config,
            contenders(config, models, schedules, sweep_of(own.sweep)),
            splitter,
            {**said, "group_by": own.group_by},
            groups=own.group_by,
            score=own.score,
        )
        blocks = Blocks(
            own.block,
            own.blocks,
            own.threads,
            None if own.job_timeout is None else seconds_of(own.job_timeout, "--job-timeout"),
            None if own.time_limit is None else seconds_of(own.time_limit, "--time-limit"),
        )
        plan = plan_folds(question, blocks, own.folds * own.repeats)
        if own.dry_run:
            _print_jobs(plan)
            return 0
        out = own.out or FOLDER / folder_name("-".join(one.name for one in models), config.data)
        folder = begin(plan, out, own.resume)
        outcome = _train(plan, folder, blocks)
        found = findings_of(folder)
        write_findings(folder, found)
        _print(found, folder, outcome, own.classes)
        if outcome.stopped is not None:
            print(f"stopped: {outcome.stopped}; go on by the same command with --resume --out {folder.path}")
            return EXIT_INTERRUPTED
        return 1 if found.failed else 0


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _print_jobs(plan: Plan) -> None:
    jobs = [job for jobs in plan.jobs("splits.npz").values() for job in jobs]
    print(f"{len(jobs)} jobs: {len(plan.question.contenders)} candidates x {len(plan.splits)} folds")
    for number, split in enumerate(plan.splits):
        print(f"fold {number}: {len(split.train):,} samples to train on, {len(split.test):,} held out")
    for job in jobs:
        print(printable(job.name))


def _train(plan: Plan, folder: FarmFolder, blocks: Blocks) -> FarmOutcome:
    before = {job: JobState.FINISHED for job in known_jobs(folder) if folder.state(job) is JobState.FINISHED}
    progress = FarmProgress(known_jobs(folder), dict(before))
    display = FarmDisplay(before, sys.stdout)

    def hear(what: Happening) -> None:
        now = time.time()
        if isinstance(what, JobBegan):
            progress.begin(what.job.name, what.block, now)
        elif isinstance(what, EpochEnded):
            progress.epoch(what.block, what.record)
        elif isinstance(what, JobEnded):
            progress.end(what.block, what.outcome.state, what.outcome.seconds)
        display.show(progress, now)

    try:
        return train_folds(plan, folder, blocks, hear)
    finally:
        display.close()


def _print(found: Findings, folder: FarmFolder, outcome: FarmOutcome, classes: bool) -> None:
    console = console_on(sys.stdout)
    if found.scores:
        console.print(score_table(found))
        if classes:
            console.print(class_table(found))
    for one in found.differences:
        print(printable(one.sentence))
    for (candidate, why), jobs in _alike(found.failed).items():
        count = f"{len(jobs)} jobs" if len(jobs) > 1 else "a job"
        print(
            f"{count} of {printable(candidate)} failed: {printable(why)}; see {folder.job(jobs[0]) / ERROR}"
        )
    if outcome.seconds > 0 and outcome.busy_s > 0:
        times = outcome.busy_s / outcome.seconds
        print(
            f"the jobs took {duration(outcome.busy_s)} added up, and {duration(outcome.seconds)} by the "
            f"clock on {outcome.blocks} block{'' if outcome.blocks == 1 else 's'}: {times:.2f} at a time"
        )
    print(f"scores: {folder.path / SCORES}, comparison: {folder.path / COMPARISON}")


def _alike(failed: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """Return the jobs of each candidate that have failed for the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for job, why in failed.items():
        found.setdefault((job.rpartition("/")[0], why), []).append(job)
    return found


def score_table(found: Findings) -> Table:
    """Return the table of scores, the best candidate first."""
    names = best_first(found)
    metric = found.scores[names[0]].metric
    heads = ("candidate", metric, "deviation", "out of fold", "folds", "seconds each")
    table = _table(*heads)
    for name in names:
        one, seconds = found.scores[name], found.seconds[name]
        shown = [_figure(value, one) for value in (one.mean, one.deviation, one.out_of_fold)]
        folds = f"{len(one.known)}" if not one.missing else f"{len(one.known)} of {len(one.folds)}"
        table.add_row(printable(name), *shown, folds, f"{mean(seconds):.2f}" if seconds else "")
    return table


def class_table(found: Findings) -> Table:
    """Return the table of the accuracy of each class."""
    names = best_first(found)
    classes = max(len(one.per_class) for one in found.scores.values())
    labels = [found.labels[at] if at < len(found.labels) else str(at) for at in range(classes)]
    table = _table("candidate", *labels)
    for name in names:
        shares = found.scores[name].per_class
        cells = ["" if math.isnan(share) else f"{share:.1%}" for share in shares]
        table.add_row(printable(name), *cells)
    return table


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for at, head in enumerate(heads):
        table.add_column(printable(head), justify="right" if at else "left", no_wrap=not at)
    return table


def _figure(value: float, scores: Scores) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.2%}" if MEASURES[scores.metric].share else f"{value:.4g}"
