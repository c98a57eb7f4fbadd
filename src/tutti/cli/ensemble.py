"""`tutti ensemble`."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from rich import box
from rich.table import Table
from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.records.farm_folder import FarmFolder
from tutti.records.untrusted import printable
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.cross_validation.scores import MEASURES, Scores
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, Choice, choose, read_trained
from tutti.studies.ensemble.combining import METHODS
from tutti.terminal import console_on


@part("ensemble")
class EnsembleCommand(Command):
    """Combine the models of a cross-validation: is their ensemble better than the best of them?

    Chooses by what each model predicts for the samples that it never saw, and scores the ensemble on
    folds that it was not chosen by.
    """

    example = "tutti ensemble farms/2026-01-31-120000-lenet-mlp-mnist --top 3 --method greedy"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("farm", metavar="FARM", help="the folder that 'tutti cv' wrote")
        parser.option("--top", "combine the K best candidates (default: all)", "K", type=int)
        how = "mean; weights of the least loss; stacking by a linear model; greedy selection of candidates"
        parser.option("--method", how, default="greedy", choices=tuple(METHODS))

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Choose, and print what can be told."""
        trained = read_trained(FarmFolder.open(own.farm))
        found = choose(trained, own.method, own.top)
        console_on(sys.stdout).print(_table(found))
        for name in trained.left_out:
            print(f"left out, as not all of its folds have finished: {printable(name)}")
        print(printable(found.gain.sentence))
        return 0


def _table(found: Choice) -> Table:
    """Return the table of all candidates with their weights, and of the two that are compared."""
    metric = found.scores[ENSEMBLE].metric
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for at, head in enumerate(("candidate", "weight", metric, "deviation")):
        table.add_column(head, justify="right" if at else "left", no_wrap=not at)
    made = found.combination
    shown = [f"{weight:.3f}" for weight in made.weights] or ["stacked" for _ in made.candidates]
    weights = dict(zip(made.candidates, shown, strict=True))
    named = [name for name in found.scores if name not in (ENSEMBLE, BEST)]
    sign = -1 if MEASURES[metric].better == "higher" else 1
    for name in [*sorted(named, key=lambda name: sign * found.scores[name].mean), BEST, ENSEMBLE]:
        one = found.scores[name]
        called = printable(name) if name in named else f"{name}, chosen on other folds"
        table.add_row(called, weights.get(name, ""), _figure(one.mean, one), _figure(one.deviation, one))
    return table


def _figure(value: float, scores: Scores) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.2%}" if MEASURES[scores.metric].share else f"{value:.4g}"
