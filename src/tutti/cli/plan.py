"""`tutti plan`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, Final

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, add_config_options, command_words, config_from
from tutti.errors import BadOption
from tutti.records.json_lines import to_json
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.autotune.plan import BUDGET_S, plan

LEFT_OUT: Final = (
    *("model", "validate", "parallel", "parallel_options", "hosts", "servers", "levels", "climb_every"),
    *("balance", "log", "out"),
)
"""Options of a training run that a plan has not, or has of its own."""

OWN: Final = ("budget", "precisions", "batch_sizes", "exhaustive", "json")


def define(parser: Parser) -> None:
    """Add what to measure, and the options of a training run."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as for 'tutti train'"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"how long to measure at most, the start of the ranks included (default: {BUDGET_S:g})",
    )
    parser.add_argument(
        "--precisions",
        default="",
        metavar="NAMES",
        help="precisions to choose from, with commas, such as fp32,bf16 (default: that of --precision; what "
        "bf16 would bring is measured too, but not chosen, because it rounds more)",
    )
    parser.add_argument(
        "--batch-sizes",
        default="",
        metavar="NUMBERS",
        help="batch sizes to choose from, with commas, such as 64,128 (default: that of --batch-size)",
    )
    parser.add_argument(
        "--exhaustive",
        action="store_true",
        help="measure every combination until the time is up, instead of stopping slow ones early",
    )
    parser.add_argument("--json", default=None, metavar="FILE", help="write all that was measured there")
    add_config_options(parser, leave_out=LEFT_OUT)


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Measure; print the table, the reason, and the command to use."""
    given: dict[str, Any] = dict(vars(arguments))
    own = {name: given.pop(name) for name in OWN}
    _refuse_both(given, own)
    file = None if own["json"] is None else _writable(Path(own["json"]))
    config = config_from(given, dotted)
    print(f"plan: measuring for at most {own['budget']:g} s", flush=True)
    found = plan(
        config,
        given,
        budget_s=own["budget"],
        precisions=_words(own["precisions"]),
        batch_sizes=_numbers(own["batch_sizes"]),
        exhaustive=own["exhaustive"],
    )
    command = shlex.join(["tutti", "train", *command_words(found.pick.candidate.applied_to(config))])
    found.show(sys.stdout)
    print(*found.why(), sep="\n")
    print(f"measured in {found.seconds:.0f} s\n\n{command}", flush=True)
    if file is not None:
        file.write_text(to_json({**found.as_json(), "command": command}, indent=2) + "\n", encoding="utf-8")
    return 0


def _refuse_both(given: dict[str, Any], own: dict[str, Any]) -> None:
    for one, several in (("precision", "precisions"), ("batch_size", "batch_sizes")):
        if one in given and own[several]:
            flags = [f"--{name.replace('_', '-')}" for name in (one, several)]
            raise BadOption(f"both {flags[0]} and {flags[1]} are given; give one of them")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    words = _words(text)
    if not all(word.isdecimal() for word in words):
        raise BadOption(f"--batch-sizes is '{text}'; give whole numbers with commas, such as 64,128")
    return [int(word) for word in words]


def _writable(path: Path) -> Path:
    """The path, of a file that can be written: found out before a minute is spent on what goes there."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise BadOption(f"cannot write --json {path}: {error.strerror}; name another file") from error
    return path


@part("plan")
def command() -> Command:
    """Measure which ranks, threads, layout and precision are fastest here."""
    return Command(
        name="plan",
        about="Measure on this machine how to train a network fastest: how many ranks with how many\n"
        "threads, in which memory layout and, when allowed, in which precision and batch size. What\n"
        "is clearly slower than the best is stopped early. Options that are given are kept. Prints\n"
        "the command to use.",
        example="tutti plan lenet --data mnist --batch-size 128",
        define=define,
        run=run,
        dotted=tuple(name for name in DOTTED if name not in LEFT_OUT),
    )
