"""`tutti compare`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command, print_page, stopped
from tutti.cli.options import (
    GOAL,
    Parser,
    Words,
    accuracy,
    field_name,
    numbers_of,
    parse_value,
    sweep_of,
    words_of,
)
from tutti.errors import BadOption, RunStopped, UnknownName
from tutti.launch.cores import allowed_cores
from tutti.records.comparison import CPU, LAYOUT, SCALINGS, STRONG, Comparison, ComparisonFolder
from tutti.records.run_folder import folder_name, refuse_used
from tutti.registry import part
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import read_comparison
from tutti.reports.text import show
from tutti.run.jobs import Recipe
from tutti.run.names import check_here
from tutti.terminal import IMPORTING, wait_shown
from tutti.training.intervals import OFF

FOLDER = Path("comparisons")
"""Default folder of comparisons."""

SEVERAL = "may be given several times"

_FIXED = (
    *("strategy", "parallel", "workers", "threads", "device", "hosts", "goal", "out"),
    *("time_limit", "checkpoint", "keep", "on_failure", "hang_timeout"),
)
"""The options of a run that a comparison decides. Its runs have no checkpoints, as their time is measured."""

LAYOUT_OPTIONS = f"{LAYOUT}_options"
"""The field of the options of layouts."""


@part("compare")
class CompareCommand(Command):
    """Train in several ways: which is fastest here?

    Trains the same network in each way in turn. One table shows the time, the speed-up over one process, and
    the accuracy.
    """

    aim = "find the fastest way to train"
    example = "tutti compare lenet --data mnist --strategies solo,sync,easgd -n 1,2 --repeats 3 --epochs 2"

    @override
    def define(self, parser: Parser) -> None:
        parser.model()
        parser.option(
            "--strategies",
            "ways to train, with commas; solo, the baseline, is one process with one thread, and with all",
            "NAMES",
            "solo,sync,hogwild,easgd",
        )
        workers = "numbers of ranks, with commas, or auto: one for each allowed core"
        parser.option("-n, --workers", workers, "NUMBERS", "auto")
        parser.option(
            "--parallel",
            "also hold one model on several ranks: tensor, pipeline, sharded, data=2,tensor=2 and so on, as "
            f"for 'tutti train'; {SEVERAL}",
            "LAYOUT",
            [],
            dest="layouts",
            action="append",
        )
        devices = "cpu, cuda, or cpu,cuda: every combination on each of them"
        parser.option("--devices", devices, "NAMES", CPU)
        parser.option("--repeats", "runs of each combination", "N", 3, type=int)
        goal = f"{GOAL}; the table has the seconds until it was reached"
        parser.option("--goal", goal, "X", type=accuracy)
        parser.option(
            "--scaling",
            "strong: --batch-size is that of all workers together; weak: of each worker; or strong,weak",
            "KINDS",
            STRONG,
        )
        parser.option(
            "--sweep",
            f"cross in an option of 'tutti train', such as batch_size=32,64 or strategy.every=1,4; {SEVERAL}",
            "KEY=VALUES",
            [],
            action="append",
        )
        parser.option(
            "--for",
            f"an option for one strategy or layout alone, such as gem:optimizer=sgd; {SEVERAL}",
            "STRATEGY:KEY=VALUE",
            [],
            dest="own",
            action="append",
        )
        parser.option("--out", "folder for the runs (default: comparisons/DATE-MODEL-DATA)", "FOLDER")
        parser.option("--resume", "continue the comparison in --out; finished runs are kept")
        parser.config_options(leave_out=_FIXED)

    @override
    def run(self, words: Words) -> int:
        """Run every combination, and print the table. The exit code is 1 if one failed."""
        own, layout_options = words.own, words.dotted.pop(LAYOUT_OPTIONS, {})
        of_layouts = {f"{LAYOUT}.{key}": [value] for key, value in layout_options.items()}
        config = words.config(checkpoint=OFF)
        for strategy in words_of(own.strategies):
            check_here(Recipe(replace(config, strategy=strategy)))
        with wait_shown(IMPORTING):
            from tutti.studies.compare import Question, compare, plan_comparison

        question = Question(
            config=config,
            strategies=words_of(own.strategies),
            workers=_workers(own.workers),
            scalings=_scalings(own.scaling),
            repeats=own.repeats,
            goal=own.goal,
            sweep=of_layouts | sweep_of(own.sweep),
            own=own_options(own.own),
            devices=words_of(own.devices),
            layouts=own.layouts,
        )
        comparison = plan_comparison(question)
        folder = _folder(own.out, own.resume, comparison)
        ComparisonFolder(folder).write(comparison)
        ended: RunStopped | None = None
        try:
            compare(question, comparison, folder, lambda line: print(line, flush=True))
        except RunStopped as error:
            ended = error
        finally:
            results = read_comparison(folder)
            show(results, sys.stdout)
            print_page(lambda: write_report(results, folder / PAGE), folder)
        if ended is not None:
            return stopped(str(ended), folder)
        return 1 if results.errors else 0


def _folder(out: str | None, resume: bool, comparison: Comparison) -> Path:
    """Return the folder of the comparison; refuse the folder of another one."""
    if out is None:
        if resume:
            raise BadOption("--resume needs --out: the folder of the comparison to continue")
        return FOLDER / folder_name(comparison.model, comparison.data)
    folder = Path(out)
    if not resume:
        refuse_used(folder)
    elif ComparisonFolder(folder).read() != comparison:
        raise BadOption(f"{folder} has a comparison with other options; give its options, or another --out")
    return folder


def _workers(text: str) -> list[int]:
    if text == "auto":
        return [allowed_cores().usable]
    return numbers_of(text, "--workers", "1,2,4, or auto")


def _scalings(text: str) -> list[str]:
    for word in words_of(text):
        if word not in SCALINGS:
            raise UnknownName("value", word, SCALINGS, of="--scaling")
    return words_of(text)


def own_options(given: list[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each strategy or layout, from texts such as "gem:optimizer=sgd"."""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        start, equals, value = text.partition("=")
        strategy, colon, key = start.rpartition(":")
        if not (strategy and colon and key and equals and value):
            raise BadOption(f"--for is '{text}'; give STRATEGY:KEY=VALUE, such as gem:optimizer=sgd")
        found.setdefault(strategy, {})[field_name(key)] = parse_value(value)
    return found
