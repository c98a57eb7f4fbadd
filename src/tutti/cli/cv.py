"""`tutti cv`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from tutti.cli.command import Command, print_page, stopped
from tutti.cli.engines import array_job, define_farm, print_script, ranks_by_block, submit
from tutti.cli.options import Parser, config_from, sweep_of, words_of
from tutti.errors import BadOption
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.blocks import Blocks
from tutti.studies.cross_validation.asked_score import asked_score
from tutti.studies.cross_validation.candidates import (
    NONE,
    NOT_SWEPT,
    choices_of,
    contenders,
    refuse_own_folds,
)
from tutti.studies.cross_validation.display import print_findings, print_jobs, train_shown
from tutti.studies.cross_validation.page import write_cv_page
from tutti.studies.cross_validation.scores import MEASURES
from tutti.studies.cross_validation.study import (
    CrossValidation,
    begin,
    fewest_servers,
    findings_of,
    plan_folds,
    without_groups,
    write_findings,
)


@part("cv")
class CvCommand(Command):
    """Cross-validate models and schedules, many folds at once.

    Each model with each schedule is trained on the same folds, several at a time on the cores of this
    machine. Shows the scores on what each fold holds out, and which differences can be told.
    """

    aim = "find the best network"
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
            "keep samples of one group in one fold: the name of a column of the data's table, which is no "
            "input then, or of an array of their HDF5 or NPZ file",
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
        scores = (
            f"the figure that candidates are compared by: auto, {', '.join(MEASURES)}, loss, or what "
            "--metrics takes, such as FILE.py:FUNCTION; with :higher or :lower behind it where its name does "
            "not say which values are better"
        )
        parser.option("--score", scores, "NAME", "auto")
        define_farm(parser, "farms/DATE-MODELS-DATA")
        parser.option("--dry-run", "look at the data, print the runs and end")
        parser.config_options(leave_out=[*({*NOT_SWEPT} - {"data", "data_options", "seed"}), "schedule"])
        parser.fields.append("schedule_options")
        parser.dotted.append("schedule_options")

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Train all folds and print what can be told. The exit code is 1 when a fold has failed."""
        with ranks_by_block():
            return self._run(own, given, dotted)

    def _run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        config = config_from(given, dotted)
        refuse_own_folds(config)
        if own.resume and own.out is None:
            raise BadOption("--resume needs --out: the folder of the cross-validation to go on with")
        score = asked_score(own.score, "--score", config.metrics)
        config = replace(config, metrics=cast("str", score.among(config.metrics)))
        config = without_groups(config, own.group_by)
        models = choices_of("model", words_of(own.models))
        schedules = choices_of("schedule", words_of(own.schedules))
        candidates = contenders(config, models, schedules, sweep_of(own.sweep))
        array = array_job(own, fewest_servers(candidates))
        at_a_time = own.blocks if array is None else None
        blocks = Blocks.of(own.block, at_a_time, own.threads, own.job_timeout, own.time_limit)
        folds = own.folds * own.repeats
        blocks.prepare(max(0, folds) * len(candidates), fewest_servers(candidates))
        # scikit-learn takes a second to import.
        from tutti.studies.cross_validation.splits import splitter_of

        grouped = own.group_by is not None
        splitter = splitter_of(own.folds, own.repeats, config.seed, own.stratified, grouped)
        said = {"folds": own.folds, "repeats": own.repeats, "stratified": own.stratified}
        question = CrossValidation(
            config,
            candidates,
            splitter,
            {**said, "group_by": own.group_by},
            groups=own.group_by,
            score=score.name,
        )
        plan = plan_folds(question, blocks, folds)
        if own.dry_run:
            print_jobs(plan, sys.stdout)
            if array is not None:
                print_script(array, Path(own.out or plan.usual_folder()))
            return 0
        folder = begin(plan, own.out or plan.usual_folder(), own.resume)
        if array is not None:
            submit(array, folder.path)
            return 0
        # The folder has the splits now: eight bytes for each sample of each fold, as long as the farm works.
        del plan
        outcome = train_shown(question, folder, blocks, sys.stdout)
        found = findings_of(folder)
        write_findings(folder, found)
        print_findings(found, folder, outcome, sys.stdout)
        print_page(lambda: write_cv_page(folder, found), folder.path)
        if outcome.stopped is not None:
            return stopped(outcome.stopped, folder.path)
        return 1 if found.failed else 0
