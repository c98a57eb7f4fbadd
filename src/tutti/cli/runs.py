"""`tutti runs`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.errors import BadOption
from tutti.records.json_lines import to_json
from tutti.records.run_folder import RUNS
from tutti.registry import part
from tutti.run.config import Options
from tutti.terminal import console_on
from tutti.watching.listing import list_runs, table_of


@part("runs")
class RunsCommand(Command):
    """List the runs here, newest first, and what came out.

    Of each run below the folder, those of comparisons and farms too: model, data, strategy, ranks, state,
    accuracy on the test and on the validation part, and time.
    """

    aim = "see how runs go, and what came out"
    example = "tutti runs --newest 10"

    @override
    def define(self, parser: Parser) -> None:
        where = f"where to look for run folders (default: {RUNS})"
        parser.add_argument("folder", metavar="FOLDER", nargs="?", default=str(RUNS), help=where)
        parser.option("--newest", "list at most this many", "N", type=int)
        parser.option("--json", "print a JSON object a line instead, with all metrics, for other programs")

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        if own.newest is not None and own.newest < 1:
            raise BadOption(f"--newest is {own.newest}; the smallest possible is 1")
        folder = Path(own.folder)
        if own.folder == str(RUNS) and not folder.exists():
            print(f"no runs: there is no folder {RUNS} here; 'tutti train' makes it", file=sys.stderr)
            return 0
        runs = list_runs(folder, own.newest)
        if own.json:
            for one in runs:
                print(to_json(one))
            return 0
        if runs:
            console_on(sys.stdout).print(table_of(runs))
        for one in runs:
            if one.problem is not None:
                print(f"tutti: warning: {one.problem}", file=sys.stderr)
        if not runs:
            print(f"no runs below {folder}", file=sys.stderr)
        return 0
