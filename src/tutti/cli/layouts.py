"""`tutti layouts`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, add_config_options, config_from
from tutti.launch.cores import allowed_cores
from tutti.model_parallel.layout import ranks_of
from tutti.registry import part
from tutti.run.config import Options
from tutti.run.jobs import run as run_job
from tutti.studies.layouts_job import LayoutsJob

USED = ("data", "parallel", "workers", "batch_size", "optimizer", "lr", "loss", "precision", "seed")
"""The options of a training run that the memory depends on."""


def define(parser: Parser) -> None:
    """The model, and the options of a training run that matter."""
    parser.add_argument("model", metavar="MODEL", help="as for 'tutti train'")
    every = [name for name in vars(config_from({}, {})) if name not in USED and name not in DOTTED]
    add_config_options(
        parser, leave_out=every, defaults={"parallel": "every layout of so many ranks", "lr": "its own"}
    )


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Print the table; nothing is trained."""
    config = config_from(dict(vars(arguments)), dotted)
    asked = ranks_of(config.parallel) if config.parallel is not None else None
    cores = asked or max(2, allowed_cores().usable)
    ranks = cores if config.workers == "auto" else int(config.workers)
    alone = replace(config, workers="1", parallel=None, parallel_options={})
    run_job(LayoutsJob(alone, ranks, config.parallel, config.parallel_options))
    return 0


@part("layouts")
def command() -> Command:
    """Tell how much memory a rank needs, by what ranks share of a model."""
    return Command(
        name="layouts",
        about="Tell how much memory each rank needs to train a model, by what the ranks share of it:\n"
        "found by a dry run, before anything starts. On one host; the rank that needs the most.",
        example="tutti layouts mlp --data mnist -n 4 --batch-size 256 --model.hidden 4096,4096",
        define=define,
        run=run,
        dotted=DOTTED,
    )
