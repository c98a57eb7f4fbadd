"""`tutti chaos`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, words_of
from tutti.cli.train import TrainCommand, config_of
from tutti.errors import BadOption
from tutti.launch.launcher import Launcher, started_by
from tutti.registry import part
from tutti.run.config import SHRINK, STOP, Options, TrainConfig
from tutti.run.train_job import TrainJob
from tutti.studies.chaos import script
from tutti.studies.chaos.disturbance import Event, Promise
from tutti.studies.chaos.script import KINDS, USUAL, check_kinds
from tutti.studies.chaos.study import Outcome, Question, disturb, summary

_HEAD: Final = f"{'at':>8}  {'fault':<10}  {'rank':<6}  {'named':<5}  {'next step':>9}  {'made again':>10}"


@part("chaos")
class ChaosCommand(Command):
    """Kill, stop and slow the ranks of a training: does it survive?

    Runs a training of yours, has faults befall it by a script that its seed decides, and says of each
    who was hit, whether the training named rank and cause, how long it took until all ranks had made
    another step, and how many steps were made again.
    """

    aim = "train a network"
    example = "tutti chaos --every 5 --compare train lenet --data mnist -n 2 --on-failure respawn"
    own_words = True

    @override
    def define(self, parser: Parser) -> None:
        kinds = "; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items())
        parser.option("--events", f"faults, with commas. {kinds}", "NAMES", ",".join(USUAL))
        parser.option("--every", "seconds between a recovery and the next fault", "X", 2.0, type=float)
        parser.option("--most", "how many faults at most; by default until the end", "N", type=int)
        parser.option("--seed", "decides which fault comes when, and to which rank", "N", 0, type=int)
        parser.option(
            "--compare",
            "train once more, undisturbed: how much sooner is that done, and are the final weights the same?",
        )
        parser.add_argument(
            "training",
            nargs=argparse.REMAINDER,
            metavar="TRAINING",
            help="train with its options, --on-failure among them",
        )

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Train and disturb. The exit code is 1 if something was not survived, or nothing was tried.

        It is that of a training which fails before there was a fault.
        """
        question = _question(own)
        print(_HEAD, flush=True)
        found = disturb(question, _tell)
        if not found.events and found.code > 0 and not found.hung:
            print(
                "tutti: error: the training failed before the first fault, as it says above", file=sys.stderr
            )
            return found.code
        for line in summary(found, question.promise.losses):
            print(line)
        return _verdict(found)


def _question(own: argparse.Namespace) -> Question:
    words = own.training[1:] if own.training[:1] == ["tutti"] else own.training
    if words[:1] != ["train"]:
        raise BadOption(
            "chaos disturbs a training; give one behind the options of chaos, such as: tutti chaos train "
            "lenet --data mnist -n 2 --on-failure respawn"
        )
    if not 0 <= own.every < math.inf:
        raise BadOption(f"--every is {own.every:g}; give seconds from 0 on")
    if own.most is not None and own.most < 1:
        raise BadOption(f"--most is {own.most}; give at least 1")
    training, given, dotted = TrainCommand().parse(words[1:])
    config = config_of(training, given, dotted)
    _refuse(training, config)
    kinds = words_of(own.events)
    check_kinds(kinds)
    hang_timeout_s = TrainJob(config).hang_timeout_s
    if {*kinds} == {script.STOP} and hang_timeout_s is None:
        raise BadOption("nothing finds a rank that is stopped, as --hang-timeout is off; give it a time")
    return Question(
        words=_without_out(words),
        out=None if config.out is None else Path(config.out),
        promise=Promise(config.on_failure != SHRINK, config.max_failures, hang_timeout_s),
        kinds=kinds,
        every_s=own.every,
        most=own.most,
        seed=own.seed,
        compare=own.compare,
        repeats=own.compare and repeats(config),
    )


def _refuse(training: argparse.Namespace, config: TrainConfig) -> None:
    """Refuse a training that has nothing to survive, or elsewhere.

    Raises:
        BadOption: the message says why.
    """
    if started_by().launcher is not Launcher.ALONE:
        raise BadOption("chaos starts a training itself; run it without a launcher of ranks")
    if config.hosts is not None:
        raise BadOption("chaos reaches the ranks of this machine alone; leave --hosts out")
    if training.resume is not None:
        raise BadOption("chaos disturbs a training from its beginning on; leave --resume out")
    if config.on_failure == STOP:
        raise BadOption(
            "the training is not to survive a lost rank; add --on-failure respawn or shrink to it"
        )


def _without_out(words: list[str]) -> list[str]:
    """The words of a training but for its run folder."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


def repeats(config: TrainConfig) -> bool:
    """Tell whether a training does the same in every run, however fast its ranks are."""
    from tutti.strategies import named
    from tutti.strategies.base import Pace

    if config.balance != "none" or config.strategy_options.get("quorum", 1) != 1:
        return False
    return config.strategy == "auto" or named(config.strategy).pace is not Pace.FREE


def _tell(event: Event) -> None:
    ranks = ",".join(map(str, event.ranks))
    taken = "-" if event.next_s is None else f"{event.next_s:.2f} s"
    if not event.survived:
        taken = "never"
    named = "yes" if event.named else "NO"
    redone = f"{event.redone:,}"
    print(
        f"{event.at_s:>6.1f} s  {event.kind:<10}  {ranks:<6}  {named:<5}  {taken:>9}  {redone:>10}",
        flush=True,
    )


def _verdict(found: Outcome) -> int:
    for reason in found.broken:
        print(f"tutti: error: the training did not keep what it promises: {reason}", file=sys.stderr)
    # Where nothing has been tried, nothing has been shown.
    return int(bool(found.broken) or not found.events)
