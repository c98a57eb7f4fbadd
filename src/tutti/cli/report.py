"""`tutti report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.comparisons import Comparison
from tutti.experiments.config import Options
from tutti.reports.page import write_report
from tutti.reports.scaling import rows
from tutti.reports.text import show


def define(parser: Parser) -> None:
    """The folder."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder that 'tutti compare' wrote")


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Print the table and write the page anew, from the records alone."""
    folder = Path(arguments.folder)
    comparison = Comparison.read(folder)
    show(comparison, rows(comparison, folder), sys.stdout)
    print(f"report: {write_report(comparison, folder)}")
    return 0


COMMAND = Command(
    name="report",
    about="Make the table and the page of a comparison anew, from its records: on any machine, without\n"
    "torch and without MPI.",
    example="tutti report comparisons/2026-01-31-120000-lenet-mnist",
    define=define,
    run=run,
    dotted=(),
)
