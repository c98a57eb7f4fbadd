"""`tutti report`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.records.run_folder import folder_name
from tutti.registry import part
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import Results, read_results
from tutti.reports.text import show
from tutti.run.config import Options

FOLDER = Path("reports")
"""Where the page of several runs goes that the user gave no place for."""


def define(parser: Parser) -> None:
    """The folders, and where the page goes."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="the folder that 'tutti compare' wrote, or one or more run folders of 'tutti train'",
    )
    parser.add_argument(
        "--out",
        metavar="PLACE",
        help="where the page goes: an .html file, or a folder for report.html (default: the folder given; "
        "of several runs reports/DATE-MODEL-DATA)",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="X",
        help="accuracy on the validation part, 0 to 1; shows the seconds until it was reached",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="put runs of different data or models side by side all the same",
    )


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Print the table and write the page, from the records alone."""
    folders = [Path(folder) for folder in arguments.folders]
    results = read_results(folders, arguments.force)
    if arguments.target is not None:
        results = replace(results, comparison=replace(results.comparison, target=arguments.target))
    for note in results.notes:
        print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
    show(results, sys.stdout)
    print(f"report: {write_report(results, _page(arguments.out, folders, results))}")
    return 0


def _page(out: str | None, folders: list[Path], results: Results) -> Path:
    if out is not None:
        return Path(out) if Path(out).suffix == ".html" else Path(out) / PAGE
    if len(folders) == 1:
        return folders[0] / PAGE
    return FOLDER / folder_name(results.comparison.model, results.comparison.data) / PAGE


@part("report")
def command() -> Command:
    """Make the table and the page of a comparison, from its records."""
    return Command(
        name="report",
        about="Make the table and the page of a comparison anew, or put runs of different days side by\n"
        "side: from their records alone, on any machine, without torch and without MPI.",
        example="tutti report runs/2026-01-30-180000-lenet-mnist runs/2026-01-31-120000-lenet-mnist",
        define=define,
        run=run,
        dotted=(),
    )
