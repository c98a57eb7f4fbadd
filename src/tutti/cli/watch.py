"""`tutti watch`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.errors import BadOption
from tutti.registry import part
from tutti.run.config import Options
from tutti.watching.follow import follow, show
from tutti.watching.health import Limits


def define(parser: Parser) -> None:
    """The run, and when something is said about a rank."""
    usual = Limits()
    parser.add_argument("run", metavar="RUN", help="the run folder that 'tutti train' writes")
    parser.add_argument(
        "--once",
        action="store_true",
        help="show how the run is now and end: exit code 0, or 1 if it failed or a rank is lost",
    )
    parser.add_argument(
        "--silent-after",
        type=float,
        default=usual.silent_s,
        metavar="SECONDS",
        help="name a rank that has given no sign of life, or made no step, for so long; ranks give one each "
        f"second (default: {usual.silent_s:g})",
    )
    parser.add_argument(
        "--behind",
        type=int,
        default=usual.behind,
        metavar="STEPS",
        help=f"name a rank that has made so many steps fewer than the others (default: {usual.behind})",
    )


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Show the run, now or until it ends. The exit code is 1 when it failed."""
    if arguments.silent_after < 2:
        raise BadOption(
            f"--silent-after is {arguments.silent_after:g}; give at least 2: ranks give a sign each second"
        )
    if arguments.behind < 1:
        raise BadOption(f"--behind is {arguments.behind}; the smallest possible is 1")
    limits = Limits(arguments.silent_after, arguments.behind)
    look = show if arguments.once else follow
    return 0 if look(Path(arguments.run), limits, sys.stdout) else 1


@part("watch")
def command() -> Command:
    """Follow a run: epochs, time left, and the health of each rank."""
    return Command(
        name="watch",
        about="Follow a run in the terminal, from another shell or another host that sees its folder:\n"
        "epochs, time left, and for each rank its step, samples per second, memory and last sign of\n"
        "life. A rank that falls behind, stops or fails is named. Ends with the run; Ctrl-C ends\n"
        "the watching, not the run.",
        example="tutti watch runs/2026-01-31-120000-lenet-mnist",
        define=define,
        run=run,
        dotted=(),
    )
