"""`tutti verify`."""

from __future__ import annotations

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import TuttiError
from tutti.registry import part
from tutti.run.config import OF_LONG_RUNS
from tutti.run.start import run as run_job
from tutti.studies.verify.tolerance import DTYPES, VerifyJob


@part("verify")
class VerifyCommand(Command):
    """Show that parallel training follows sequential training.

    Trains for some steps on several ranks, and with plain torch in one process, from the same weights on the
    same batches. Prints the largest relative deviation of loss, gradient and weights. The exit code is 1 if
    they differ.
    """

    aim = "look at the data and this machine"
    example = "tutti verify lenet --data mnist -n 2 --optimizer sgd --lr 0.1 --dtype float64"

    @override
    def define(self, parser: Parser) -> None:
        parser.model(required=True)
        parser.option("--steps", "weight updates to compare", "N", 20, type=int)
        dtype = "type of all numbers; with float64 rounding is negligible"
        parser.option("--dtype", dtype, default="float32", choices=tuple(DTYPES))
        parser.config_options(leave_out=("epochs", "steps", *OF_LONG_RUNS, "precision", "log", "out"))

    @override
    def run(self, words: Words) -> int:
        dtype = words.own.dtype
        config = words.config(steps=words.own.steps, precision=DTYPES[dtype])
        verdict = run_job(VerifyJob(config, dtype))
        if verdict is None:
            raise TuttiError(
                "the verdict is above, but the first host is another machine, so there is no exit code for "
                "it. Name this machine first in --hosts, or run the command on the first host"
            )
        return 0 if getattr(verdict, "follows", False) else 1
