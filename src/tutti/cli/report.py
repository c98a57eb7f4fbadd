"""`tutti report`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import GOAL, Parser, Words, accuracy
from tutti.records.farm_folder import FARM, FarmFolder
from tutti.records.run_folder import folder_name
from tutti.registry import part
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import Results, read_results
from tutti.reports.text import show

FOLDER = Path("reports")
"""The default folder for the page of several runs."""

TUNE: Final = "tune"
"""The kind of farm that 'tutti tune' makes."""


@part("report")
class ReportCommand(Command):
    """Make the table and the page of runs, a comparison or a search.

    Runs of different days can be compared. Works on any machine, without torch and MPI.
    """

    aim = "see how runs go, and what came out"
    example = "tutti report runs/2026-01-30-180000-lenet-mnist runs/2026-01-31-120000-lenet-mnist"

    @override
    def define(self, parser: Parser) -> None:
        of = (
            "the folder that 'tutti compare', 'tutti cv' or 'tutti tune' wrote, or one or more run folders "
            "of 'tutti train'"
        )
        parser.add_argument("folders", nargs="+", metavar="FOLDER", help=of)
        parser.option(
            "--out",
            "an .html file, or a folder for report.html (default: the given folder; for several runs "
            "reports/DATE-MODEL-DATA)",
            "PLACE",
        )
        parser.option("--goal", f"{GOAL}; shows the seconds until it was reached", "X", type=accuracy)

    @override
    def run(self, words: Words) -> int:
        own = words.own
        folders = [Path(folder) for folder in own.folders]
        if len(folders) == 1 and (folders[0] / FARM).is_file():
            _report_farm(FarmFolder.open(folders[0]), own.out)
            return 0
        results = read_results(folders)
        if own.goal is not None:
            results = replace(results, comparison=replace(results.comparison, goal=own.goal))
        for note in results.notes:
            print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
        show(results, sys.stdout)
        print(f"report: {write_report(results, _page(own.out, folders, results))}")
        return 0


def _report_farm(folder: FarmFolder, out: str | None) -> None:
    """Print and draw the results of a farm so far."""
    page = None if out is None else _named(out)
    if folder.plan.kind == TUNE:
        # It imports Optuna.
        from tutti.studies.search.display import print_findings as print_trials
        from tutti.studies.search.display import write_tune_page
        from tutti.studies.search.study import read_search

        tuned = read_search(folder)
        print_trials(tuned, sys.stdout)
        print(f"report: {write_tune_page(tuned, page)}")
        return
    # It imports scikit-learn.
    from tutti.studies.cross_validation.display import print_findings, write_cv_page
    from tutti.studies.cross_validation.result import CrossValidated

    found = CrossValidated.read(folder)
    print_findings(found, folder, sys.stdout)
    print(f"report: {write_cv_page(folder, found, page)}")


def _named(out: str) -> Path:
    return Path(out) if Path(out).suffix == ".html" else Path(out) / PAGE


def _page(out: str | None, folders: list[Path], results: Results) -> Path:
    if out is not None:
        return _named(out)
    if len(folders) == 1:
        return folders[0] / PAGE
    return FOLDER / folder_name(results.comparison.model, results.comparison.data) / PAGE
