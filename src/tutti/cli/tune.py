"""`tutti tune`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import partial

from typing_extensions import override

from tutti.cli.command import Command, print_page, stopped
from tutti.cli.engines import array_job, blocks_of, define_farm, print_script, ranks_by_block, submit
from tutti.cli.options import Parser, Words, command_words, words_of
from tutti.load_object import require_packages
from tutti.registry import part
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe
from tutti.run.names import check_here
from tutti.studies.crossing import SHARED
from tutti.studies.score import AUTO, scores_of
from tutti.terminal import IMPORTING, wait_shown

SPACE = "space"
"""The field of --space.NAME VALUES; a configuration has no such field."""


@part("tune")
class TuneCommand(Command):
    """Search for the best options, many trials at once.

    Trains a model many times with different options, several trials at a time on the cores of this machine.
    Shows the best trial, and the command that trains it alone.
    """

    aim = "find the best network"
    example = (
        "tutti tune mlp --data mnist --space.lr log:1e-4..1e-1 --space.model.hidden 64,128,256 --trials 30 "
        "--pruner asha --epochs 9"
    )

    @override
    def define(self, parser: Parser) -> None:
        parser.model()
        space = (
            'a TOML file with lr = "log:1e-4..1e-1", optimizer = ["adam", "sgd"]; or one by one '
            "--space.lr log:1e-4..1e-1, --space.batch_size 16..256, --space.model.hidden 64,128"
        )
        parser.option("--space", space, "FILE")
        parser.option("--trials", "number of trials; with --resume it may grow", "N", 20, type=int)
        samplers = "how to choose the next trial: tpe, gp, cma-es, random, grid or genetic"
        parser.option("--sampler", samplers, "NAME", "tpe")
        pruners = "how to end unpromising trials: none, median, asha or hyperband"
        parser.option("--pruner", pruners, "NAME", "none")
        objective = (
            "loss or a metric on the held-out samples, also FILE.py:FUNCTION, seconds, parameters; several "
            "with commas; NAME:higher or NAME:lower says which values of your own metric are better; auto "
            "is the first of --metrics"
        )
        parser.option("--objective", objective, "NAMES", AUTO)
        parser.option("--folds", "train each trial on K folds; the objective is the mean", "K", 1, type=int)
        parser.option("--stratified", "each fold has the same share of each class")
        parser.group_option("part")
        define_farm(parser, "farms/DATE-MODEL-DATA")
        parser.option("--dry-run", "check the space, look at the data and end")
        kept = {"data", "data_options", "seed", "validation", "test"}
        parser.config_options(leave_out=[*({*SHARED} - kept)])
        parser.dotted.append(SPACE)

    @override
    @ranks_by_block()
    def run(self, words: Words) -> int:
        """Search, and print the best trial. The exit code is 1 if no trial has finished."""
        own = words.own
        require_packages("'tutti tune' needs", ["optuna"], "tune")
        space = words.dotted.pop(SPACE, {})
        config = words.config()
        scores, metrics = scores_of(words_of(own.objective), config.metrics, "--objective")
        config = replace(config, metrics=metrics)
        check_here(Recipe(config))
        array = array_job(words, config.servers)
        blocks = blocks_of(words, array)
        # These import Optuna and torch, while the fork server imports torch, too.
        with wait_shown(IMPORTING):
            from tutti.studies.samples import look_at
            from tutti.studies.search.display import print_question, tune_shown, write_tune_page
            from tutti.studies.search.space import read_space, space_of
            from tutti.studies.search.study import Search

        from_file = {} if own.space is None else read_space(own.space)
        search = Search(
            config,
            space_of({**from_file, **space}),
            scores,
            own.sampler,
            own.pruner,
            own.folds,
            own.stratified,
        )
        search.check()
        samples = look_at(search.at_ends(), own.block)
        search = search.decided(samples.metrics)
        if own.dry_run:
            print_question(search, own.trials, sys.stdout)
            print_script(array, own.out)
            return 0
        folder = search.begin(samples, own.out, own.resume)
        if array is not None:
            submit(array, folder.path)
            return 0
        command = partial(train_command, block=own.block)
        found = tune_shown(search, folder, own.trials, blocks, sys.stdout, command)
        print_page(lambda: write_tune_page(found), folder.path)
        if found.outcome is not None and found.outcome.stopped is not None:
            return stopped(found.outcome.stopped, folder.path)
        return 0 if found.front else 1


def train_command(config: TrainConfig, block: int) -> str:
    """Return the command that trains a run of a block of ranks (servers included) alone."""
    return "tutti train " + shlex.join(command_words(replace(config, workers=str(block - config.servers))))
