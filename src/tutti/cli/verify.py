"""`tutti verify`."""

from __future__ import annotations

import argparse

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, add_config_options, config_from
from tutti.cli.strategy_help import strategy_help
from tutti.errors import TuttiError
from tutti.registry import part
from tutti.run.config import Options
from tutti.run.jobs import run as run_job
from tutti.studies.verify.job import DTYPES, VerifyJob

FIXED = ("model", "epochs", "steps", "precision", "log", "out")
"""Options of a training run that a comparison has not, or has of its own."""


def define(parser: Parser) -> None:
    """The model, the steps, the dtype, and the options of a training run."""
    parser.add_argument("model", metavar="MODEL", help="as for 'tutti train'")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="weight updates to compare (default: 20)"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="float32",
        metavar="{" + ",".join(DTYPES) + "}",
        help="numbers to compute with; float64 leaves no room for rounding (default: float32)",
    )
    add_config_options(parser, leave_out=FIXED)


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Compare; rank 0 prints. The exit code is 1 when the two runs differ.

    Raises:
        TuttiError: rank 0 ran on another machine, and its verdict did not come back.
    """
    given = dict(vars(arguments))
    dtype = given.pop("dtype")
    config = config_from({**given, "precision": DTYPES[dtype]}, dotted)
    verdict = run_job(VerifyJob(config, dtype))
    if verdict is None:
        raise TuttiError(
            "the verdict stands above, on the output of the first host; that host is another machine, from "
            "which no verdict comes back to be made an exit code of. Name this machine first in --hosts, or "
            "run the command on the first host"
        )
    return 0 if getattr(verdict, "follows", False) else 1


@part("verify")
def command() -> Command:
    """Show that parallel training follows sequential training."""
    return Command(
        name="verify",
        about="Show that parallel training follows sequential training: train for some steps on several\n"
        "ranks and with plain torch in one process, from the same weights on the same batches, and\n"
        "print the largest relative deviation of loss, gradient and weights. The exit code is 1\n"
        "when they differ.",
        example="tutti verify lenet --data mnist -n 2 --optimizer sgd --lr 0.1 --dtype float64",
        define=define,
        run=run,
        dotted=DOTTED,
        more_help=strategy_help,
    )
