"""`tutti cv`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import cast

from typing_extensions import override

from tutti.cli.command import Command, print_page, stopped
from tutti.cli.engines import array_job, blocks_of, define_farm, print_script, ranks_by_block, submit
from tutti.cli.options import Parser, Words, sweep_of, words_of
from tutti.errors import BadOption
from tutti.farm.jobs import FarmJob
from tutti.registry import part
from tutti.run.jobs import Recipe
from tutti.run.names import check_here
from tutti.studies.cross_validation.candidates import alternatives, candidates_of, servers_of
from tutti.studies.cross_validation.display import print_jobs, train_shown, write_cv_page
from tutti.studies.cross_validation.study import CrossValidation
from tutti.studies.crossing import SHARED, refuse_single_run
from tutti.studies.score import AUTO, score_of
from tutti.terminal import IMPORTING, wait_shown


@part("cv")
class CvCommand(Command):
    """Cross-validate models and schedules, many folds at once.

    Trains each model with each schedule on the same folds, several at a time on the cores of this machine.
    Shows the scores on the held-out samples, and which differences are significant.
    """

    aim = "find the best network"
    example = "tutti cv lenet,mlp --data mnist --folds 5 --schedule none,cosine --epochs 3 --stratified"

    @override
    def define(self, parser: Parser) -> None:
        models = "models with commas, each as for 'tutti train' (default: cnn)"
        parser.add_argument("models", metavar="MODELS", nargs="?", default="cnn", help=models)
        parser.option("--folds", "parts that are held out in turn", "K", 5, type=int)
        parser.option("--repeats", "repeat with other folds, N times in all", "N", 1, type=int)
        parser.option("--stratified", "each fold has the same share of each class")
        parser.group_option("fold")
        schedules = "schedules with commas, each as for 'tutti train' (default: the model's own, or none)"
        parser.option("--schedule", schedules, "NAMES", "", dest="schedules")
        parser.option(
            "--sweep",
            "cross in an option of 'tutti train', such as lr=0.01,0.001 or model.hidden=64,128; may be given "
            "several times",
            "KEY=VALUES",
            [],
            action="append",
        )
        scores = (
            "the figure to compare candidates by: loss, or a metric as for --metrics, such as "
            "FILE.py:FUNCTION; append :higher or :lower if the name does not say which values are better; "
            "auto is the first of --metrics"
        )
        parser.option("--score", scores, "NAME", AUTO)
        define_farm(parser, "farms/DATE-MODELS-DATA")
        parser.option("--dry-run", "look at the data, print the runs and end")
        parser.config_options(leave_out=[*({*SHARED} - {"data", "data_options", "seed", "test"}), "schedule"])
        parser.fields.append("schedule_options")
        parser.dotted.append("schedule_options")

    @override
    @ranks_by_block()
    def run(self, words: Words) -> int:
        """Train all folds, and print the scores. The exit code is 1 if a fold failed."""
        own, config = words.own, words.config()
        refuse_single_run(config, "validation")
        for name in ("optimizer", "loss", "strategy"):
            if "," in (several := getattr(config, name)):
                raise BadOption(f"--{name} takes one; candidates are given by --sweep {name}={several}")
        score = own.score
        if score != AUTO:
            found, metrics = score_of(score, config.metrics, "--score")
            score, config = str(found), replace(config, metrics=cast("str", metrics))
        models = alternatives("model", [(None, word) for word in words_of(own.models)])
        words_or_default: list[str | None] = [*words_of(own.schedules)] or [None]
        schedules = alternatives("schedule", [(None, word) for word in words_or_default])
        candidates = candidates_of(FarmJob("", config), models, schedules, sweep_of(own.sweep))
        for one in candidates.values():
            check_here(Recipe(one.config, objects=one.objects))
        array = array_job(words, servers_of(candidates))
        blocks = blocks_of(words, array)
        # These import torch and scikit-learn, while the fork server imports torch, too.
        with wait_shown(IMPORTING):
            from tutti.studies.cross_validation.splits import splitter_of
            from tutti.studies.samples import look_at

        grouped = own.group_by is not None
        splitter = splitter_of(own.folds, own.repeats, config.seed, own.stratified, grouped)
        names = ("folds", "repeats", "stratified", "group_by")
        described = {name: getattr(own, name) for name in names}
        question = CrossValidation(candidates, splitter, described, own.group_by, score)
        samples = look_at([*candidates.values()], own.block)
        splits = question.splits(samples)
        if own.dry_run:
            print_jobs(question, splits, sys.stdout)
            print_script(array, own.out)
            return 0
        folder = question.begin(samples, splits, own.out, own.resume)
        if array is not None:
            submit(array, folder.path)
            return 0
        outcome, result = train_shown(question, folder, blocks, sys.stdout)
        print_page(lambda: write_cv_page(folder, result), folder.path)
        if outcome.stopped is not None:
            return stopped(outcome.stopped, folder.path)
        return 1 if result.failed else 0
