"""`tutti compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, add_config_options, config_from, parse_value
from tutti.errors import BadOption, BadRunFolder, UnknownName, UserError
from tutti.records.comparison import CPU, LAYOUT, SCALINGS, Comparison, ComparisonFolder
from tutti.records.run_folder import folder_name
from tutti.registry import part
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import Results, read_comparison
from tutti.reports.text import show
from tutti.run.config import Options
from tutti.studies.compare import Question, compare, plan_comparison

FOLDER = Path("comparisons")
"""Where comparisons go that the user gave no folder for."""

FIXED = ("model", "strategy", "parallel", "workers", "threads", "device", "hosts", "out")
"""Options of a training run that a comparison has not, or has of its own."""


LAYOUT_OPTIONS = f"{LAYOUT}_options"
"""The options of layouts: those alone have them."""

OPTIONS: dict[str, dict[str, Any]] = {
    "--strategies": {
        "default": "solo,sync,hogwild,easgd",
        "metavar": "NAMES",
        "help": "ways to train, with commas; solo is one process, with one thread and with all of them, and "
        "is what the others are compared with (default: solo,sync,hogwild,easgd)",
    },
    "-n, --workers": {
        "default": "auto",
        "metavar": "NUMBERS",
        "help": "how many ranks, with commas, or auto: one for each allowed core (default: auto)",
    },
    "--parallel": {
        "dest": "layouts",
        "action": "append",
        "default": [],
        "metavar": "LAYOUT",
        "help": "beside the strategies, hold one model on several ranks: tensor, pipeline, sharded, "
        "data=2,tensor=2 and so on, as for 'tutti train'; may be given several times",
    },
    "--devices": {
        "default": CPU,
        "metavar": "NAMES",
        "help": "cpu, cuda, or cpu,cuda: every combination on each of them (default: cpu)",
    },
    "--repeats": {
        "type": int,
        "default": 3,
        "metavar": "N",
        "help": "runs of each combination (default: 3)",
    },
    "--target": {
        "type": float,
        "default": None,
        "metavar": "X",
        "help": "accuracy on the validation part, 0 to 1; the table has the seconds until it was reached",
    },
    "--scaling": {
        "default": "strong",
        "metavar": "KINDS",
        "help": "strong: --batch-size samples behind an update for any number of workers; weak: so many of "
        "each worker; or strong,weak (default: strong)",
    },
    "--sweep": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUES",
        "help": "cross in an option of 'tutti train', such as batch_size=32,64 or strategy.every=1,4; may be "
        "given several times",
    },
    "--for": {
        "dest": "own",
        "action": "append",
        "default": [],
        "metavar": "STRATEGY:KEY=VALUE",
        "help": "an option for one strategy or layout alone, such as gem:optimizer=sgd; may be given several "
        "times",
    },
    "--out": {
        "default": None,
        "metavar": "FOLDER",
        "help": "where to keep the runs (default: comparisons/DATE-MODEL-DATA)",
    },
    "--resume": {
        "action": "store_true",
        "help": "go on with the comparison that lies in --out: runs that have ended are kept",
    },
}
"""The options that are those of the comparison, not of its runs: what argparse is told of each."""

OWN = (
    *("strategies", "workers", "layouts", "devices", "repeats", "target", "scaling", "sweep", "own"),
    *("out", "resume"),
)
"""What they are called once they have been read."""


def define(parser: Parser) -> None:
    """Add what is compared, and the options of a training run."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as for 'tutti train'"
    )
    for flags, settings in OPTIONS.items():
        parser.add_argument(*flags.split(", "), **settings)
    add_config_options(parser, leave_out=FIXED)


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Run every combination in turn and print the table. The exit code is 1 when one of them failed."""
    given: dict[str, Any] = dict(vars(arguments))
    own = {name: given.pop(name) for name in OWN}
    of_runs = {part: values for part, values in dotted.items() if part != LAYOUT_OPTIONS}
    of_layouts = {f"{LAYOUT}.{key}": [value] for key, value in dotted.get(LAYOUT_OPTIONS, {}).items()}
    question = Question(
        config=config_from(given, of_runs),
        strategies=_words(own["strategies"]),
        workers=_numbers(own["workers"]),
        scalings=_scalings(own["scaling"]),
        repeats=own["repeats"],
        target=own["target"],
        sweep=of_layouts | _sweep(own["sweep"]),
        own=_own(own["own"]),
        devices=_words(own["devices"]),
        layouts=own["layouts"],
    )
    comparison = plan_comparison(question)
    folder = _folder(own["out"], own["resume"], comparison)
    ComparisonFolder(folder).write(comparison)
    try:
        compare(question, comparison, folder, lambda line: print(line, flush=True))
    finally:
        results = read_comparison(folder)
        show(results, sys.stdout)
        _report(results, folder)
    return 1 if results.errors else 0


def _report(results: Results, folder: Path) -> None:
    """Write the page, or say what it takes to have one."""
    try:
        print(f"report: {write_report(results, folder / PAGE)}", flush=True)
    except BadRunFolder:
        raise
    except UserError as error:
        print(f"tutti: warning: {error}; then run 'tutti report {folder}'", file=sys.stderr, flush=True)


def _folder(out: str | None, resume: bool, comparison: Comparison) -> Path:
    """The folder of the comparison, refused when it is another's."""
    if out is None:
        if resume:
            raise BadOption("--resume needs --out: the folder of the comparison to go on with")
        return FOLDER / folder_name(comparison.model, comparison.data)
    folder = Path(out)
    if resume:
        before = ComparisonFolder(folder).read()
        if before != comparison:
            raise BadOption(
                f"{folder} holds a comparison with other options; give the same as before, or another --out"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        hint = "go on with it by --resume, or " if ComparisonFolder(folder).begun else ""
        raise BadRunFolder(f"{folder} is not empty; {hint}name another folder with --out")
    return folder


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _numbers(text: str) -> list[int]:
    if text == "auto":
        from tutti.launch.cores import allowed_cores

        return [allowed_cores().usable]
    words = _words(text)
    if not all(word.isdecimal() for word in words):
        raise BadOption(f"--workers is '{text}'; give whole numbers with commas, such as 1,2,4, or auto")
    return [int(word) for word in words]


def _scalings(text: str) -> list[str]:
    for word in _words(text):
        if word not in SCALINGS:
            raise UnknownName("value", word, SCALINGS, of="--scaling")
    return _words(text)


def _sweep(given: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in given:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise BadOption(f"--sweep is '{text}'; give an option and its values, such as batch_size=32,64")
        found[_key(key)] = [parse_value(value.strip()) for value in values.split(",")]
    return found


def _own(given: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        strategy, colon, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        if not (strategy and colon and key and equals and value):
            raise BadOption(f"--for is '{text}'; give STRATEGY:KEY=VALUE, such as gem:optimizer=sgd")
        found.setdefault(strategy, {})[_key(key)] = parse_value(value)
    return found


def _key(text: str) -> str:
    return text.strip().removeprefix("--").replace("-", "_")


@part("compare")
def command() -> Command:
    """Train by several ways in turn: which is fastest here?"""
    return Command(
        name="compare",
        about="Train the same network by several ways in turn, several times, and show in one table how\n"
        "long each took, how much sooner that is than one process, and how accurate it became.",
        example="tutti compare lenet --data mnist --strategies solo,sync,easgd -n 1,2 --repeats 3 --epochs 2",
        define=define,
        run=run,
        dotted=DOTTED,
    )
