"""`tutti train`."""

from __future__ import annotations

import argparse
from typing import Any

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, add_config_options, add_trust_option, config_from
from tutti.cli.strategy_help import strategy_help
from tutti.errors import BadOption
from tutti.launch.launcher import started_by
from tutti.models import MODELS
from tutti.registry import part
from tutti.reports.advice import advice, measuring_share, stages_by_rank
from tutti.run.config import Options, TrainConfig
from tutti.run.jobs import run as run_job
from tutti.run.train_job import ProfiledSteps, RunOutcome, TrainJob
from tutti.studies.autotune.plan import planned

_OWN = ("plan", "trace", "profile", "profile_ranks")
"""Options that are no part of the configuration."""


def define(parser: Parser) -> None:
    """The options: the fields of `TrainConfig`, where they come from, and what is recorded."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"built-in model ({', '.join(MODELS)}), package.module:factory or file.py:factory "
        "(default: cnn)",
    )
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="repeat the run of this config.json (or of this run folder); other options change it",
    )
    parser.add_argument(
        "--plan",
        choices=("auto",),
        default=argparse.SUPPRESS,
        metavar="auto",
        help="measure first, for some seconds, which ranks, threads and layout are fastest on this machine; "
        "those that are given as options are kept",
    )
    add_trust_option(parser)
    _define_recordings(parser)
    add_config_options(parser, leave_out=("model",))


def _define_recordings(parser: Parser) -> None:
    """Add the options for what is recorded besides the results."""
    parser.add_argument(
        "--trace",
        action="store_true",
        default=argparse.SUPPRESS,
        help="write what every rank did when to trace.json in the run folder, for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--profile",
        type=_steps,
        default=argparse.SUPPRESS,
        metavar="A-B",
        help="have torch's profiler look at steps A to B, counted from 1",
    )
    parser.add_argument(
        "--profile-ranks",
        type=_ranks,
        default=argparse.SUPPRESS,
        metavar="R,...",
        help="on which ranks --profile looks (default: 0)",
    )


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"'{text}' are no steps; give a first and a last one, such as 10-20")
    return int(first), int(last)


def _ranks(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"'{text}' are no ranks; give numbers, such as 0,1")
    return tuple(sorted({int(word) for word in words}))


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Train as the options say; the ranks print, rank 0 writes the run folder."""
    config = config_of(arguments, dotted)
    if "plan" in arguments:
        config = planned(config, vars(arguments), lambda line: print(f"plan: {line}", flush=True))
    trace, profile = "trace" in arguments, _profiled(arguments)
    outcome = run_job(TrainJob(config, trace=trace, profile=profile))
    if isinstance(outcome, RunOutcome) and started_by().rank == 0:
        ranks = stages_by_rank(outcome.history)
        print(
            f"where the time went: {advice(ranks, outcome.config.as_json(), outcome.strategy)}; "
            f"measuring took {measuring_share(ranks):.2%}"
        )
    return 0


def _profiled(arguments: argparse.Namespace) -> ProfiledSteps | None:
    ranks = getattr(arguments, "profile_ranks", None)
    if "profile" in arguments:
        first, last = arguments.profile
        return ProfiledSteps(first, last, ranks or (0,))
    if ranks is not None:
        raise BadOption("--profile-ranks is given without --profile; add --profile 10-20 or the like")
    return None


def config_of(arguments: argparse.Namespace, dotted: dict[str, Options]) -> TrainConfig:
    """The configuration that the options make, on top of that of --config."""
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name not in _OWN}
    path, trust = given.pop("config", None), given.pop("trust", False)
    if path is None:
        return config_from(given, dotted)
    return config_from(given, dotted, TrainConfig.read(path, trust, replaced=given))


@part("train")
def command() -> Command:
    """Train a network in parallel."""
    return Command(
        name="train",
        about="Train a network in parallel: on every core of this machine, or on several machines.\n\n"
        "Prints the plan, the progress, and at the end the accuracy on the test part. Writes a run\n"
        "folder with the resolved configuration (which alone repeats the run), the history and the\n"
        "weights.",
        example="tutti train lenet --data mnist --epochs 5 --schedule one_cycle --lr 0.003 -n 2",
        define=define,
        run=run,
        dotted=DOTTED,
        more_help=strategy_help,
    )
