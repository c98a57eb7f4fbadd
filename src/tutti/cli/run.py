"""`tutti run`."""

from __future__ import annotations

import argparse

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.registry import part
from tutti.run.script import run_program


@part("run")
class RunCommand(Command):
    """Run your own program on several ranks.

    The Python program finds the other ranks with tutti.init(), and trains with tutti.distribute() and
    tutti.shard().
    """

    aim = "train a network"
    example = "tutti run -n 2 my_training.py --epochs 5"
    own_words = True

    @override
    def define(self, parser: Parser) -> None:
        parser.config_options(only=("workers", "hosts", "threads"))
        parser.add_argument("program", metavar="PROGRAM", help="a Python file with tutti.distribute or DDP")
        words = parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the program's arguments"
        )
        words.required = False  # If PROGRAM is missing, argparse should not name this, too.

    @override
    def run(self, words: Words) -> int:
        own, config = words.own, words.config()
        return run_program(own.program, own.arguments, config.workers, config.threads, config.hosts)
