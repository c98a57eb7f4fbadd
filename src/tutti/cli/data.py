"""`tutti data`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.records.preparation import NUMBER
from tutti.records.texts import printable
from tutti.registry import part
from tutti.run.config import Options
from tutti.run.summary_lines import kind_of_task, table
from tutti.tables import TextTable
from tutti.terminal import console_on

if TYPE_CHECKING:
    from tutti.data.columns import Stored
    from tutti.data.contents import Contents
    from tutti.data.rows import Array, Rows

_MOST: Final = 20
"""The most lines of a table."""


@part("data")
class DataCommand(Command):
    """Describe a data set and its problems; or convert it.

    Shows samples, shapes, classes and their balance, means and deviations, missing values, and samples that
    are both in the training and the test part. 'tutti data convert DATA NEW' writes a folder of NPY files,
    the fastest format.
    """

    aim = "look at the data and this machine"
    example = "tutti data iris.csv --data.target species"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument(
            "words", nargs="+", metavar="DATA", help="as for 'tutti train --data'; or: convert DATA NEW"
        )
        parser.config_options(only=["data_options"])

    @override
    def run(self, words: Words) -> int:
        options = words.dotted.get("data_options", {})
        match words.own.words:
            case [source]:
                _describe(source, options)
            case ["convert", source, to]:
                _convert(source, Path(to), options)
            case _:
                raise BadOption("give one DATA, as 'tutti data DATA', or two: 'tutti data convert DATA NEW'")
        return 0


def _read(source: str, options: Options) -> Contents[Stored[Rows], Array]:
    """Read a data set, with or without missing values."""
    # It imports torch.
    from tutti.data.sources import read_source

    return read_source(source, {"missing": "mean", **options})


def _convert(source: str, to: Path, options: Options) -> None:
    # It imports torch.
    from tutti.data.conversion import check_new, convert

    check_new(to)
    contents = _read(source, options)
    nbytes = convert(contents, to)
    counts = ", ".join(f"{len(targets):,} {part}" for part, (_, targets) in contents.parts.items())
    print(f"wrote {counts} samples to {to}: {nbytes:,} bytes; train on them with --data {to}")


def _describe(source: str, options: Options) -> None:
    # It imports torch.
    from tutti.data.description import describe, problems
    from tutti.data.fitting import preparation_of
    from tutti.data.targets import are_flags

    contents = replace(_read(source, options), filled=options.get("missing") == "mean")
    parts = describe(contents)
    train = parts[0]
    targets, noun = contents.parts["train"][1], "class"
    if contents.classes is None:
        noun = "label of 0 or 1" if are_flags(targets) else "number"
    count = contents.classes or targets[:1].size
    task = kind_of_task(noun, count, contents.labels or (contents.targets if noun != "class" else ()))
    print(f"{contents.name}: inputs {', '.join(train.forms)}; {task}")
    preparation = preparation_of(contents)
    if preparation is not None:
        print(table(preparation))
    for one in parts:
        repeated = f", {one.repeated:,} of them repeated" if one.repeated else ""
        print(f"{one.name + ':':<12}{one.samples:>12,} samples{repeated}")
    if train.counts:
        names = [str(one) for one in contents.labels or range(len(train.counts))]
        rows = [[name, *(f"{one.counts[at]:,}" for one in parts)] for at, name in enumerate(names)]
        _table(["class", *(one.name for one in parts)], rows)
    rows = [
        [one.name, *(f"{x:.4g}" for x in (one.mean, one.deviation, one.least, one.most)), f"{one.missing:,}"]
        for one in (*train.inputs, *train.targets)
    ]
    if contents.table is not None:
        for row, column in zip(rows, contents.table.columns, strict=False):
            row[1:-1] = row[1:-1] if column.kind == NUMBER else ["", "", "", column.kind]
    _table(["training part", "mean", "deviation", "least", "most", "missing"], rows)
    found = problems(contents, parts)
    print()
    print("nothing seems wrong" if not found else "what would go wrong in training:")
    for sentence in found[:_MOST]:
        print(f"- {printable(sentence)}")


def _table(heads: list[str], rows: list[list[str]]) -> None:
    table = TextTable(heads)
    for row in rows[:_MOST]:
        table.add_row(*row)
    print()
    console_on(sys.stdout).print(table)
    if len(rows) > _MOST:
        print(f"... {len(rows) - _MOST:,} more")
