"""`tutti run`."""

from __future__ import annotations

import argparse

from tutti.cli.command import Command
from tutti.cli.options import Parser, add_config_options
from tutti.registry import part
from tutti.run.config import Options, TrainConfig
from tutti.run.script import run_program

KEPT = ("workers", "hosts", "threads")
"""The options of a training run that say where it runs."""


def define(parser: Parser) -> None:
    """Add the place to run, the program, and its arguments."""
    add_config_options(
        parser, leave_out=[name for name in TrainConfig.__dataclass_fields__ if name not in KEPT]
    )
    parser.add_argument(
        "--no-prefix",
        action="store_true",
        help="let the ranks write to the output themselves; else, of several ranks, whole lines are printed, "
        "each with [rank N] before it",
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python file that calls tutti.init()")
    words = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the program's arguments"
    )
    words.required = False  # argparse would name it where PROGRAM is missing.


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Run it on every rank."""
    config = TrainConfig.from_json(
        {name: getattr(arguments, name) for name in KEPT if hasattr(arguments, name)}
    )
    where = config.workers, config.threads, config.hosts
    run_program(arguments.program, arguments.arguments, *where, prefix=not arguments.no_prefix)
    return 0


@part("run")
def command() -> Command:
    """Run a program of your own on several ranks."""
    return Command(
        name="run",
        about="Run a Python program of your own on several ranks: it finds the others with tutti.init(),\n"
        "and trains with tutti.distribute() and tutti.shard().",
        example="tutti run -n 2 my_training.py --epochs 5",
        define=define,
        run=run,
        dotted=(),
        own_words=True,
    )
