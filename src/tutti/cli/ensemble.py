"""`tutti ensemble`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, config_from
from tutti.records.farm_folder import FarmFolder
from tutti.records.untrusted import printable
from tutti.registry import part
from tutti.run.config import Options, TrainConfig
from tutti.run.start import run as run_job
from tutti.run.train_job import PARTS
from tutti.studies.cross_validation.scores import MEASURES, Scores
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, Choice, choose, read_trained
from tutti.studies.ensemble.combining import METHODS
from tutti.studies.ensemble.evaluation_job import HERE, EnsembleJob
from tutti.studies.ensemble.making import FOLDER, ensemble_of, refuse_there
from tutti.terminal import console_on


@part("ensemble")
class EnsembleCommand(Command):
    """Combine the models of a cross-validation: is their ensemble better than the best of them?

    Chooses by what each model predicts for the samples that it never saw, and scores the ensemble on
    folds that it was not chosen by. Saves the networks of all folds as one thing, and evaluates that on
    new samples.
    """

    example = "tutti ensemble farms/2026-01-31-120000-lenet-mlp-mnist --top 3 --method greedy"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("farm", metavar="FARM", help="the folder that 'tutti cv' wrote")
        parser.option("--top", "combine the K best candidates (default: all)", "K", type=int)
        how = "mean; weights of the least loss; stacking by a linear model; greedy selection of candidates"
        parser.option("--method", how, default="greedy", choices=tuple(METHODS))
        parser.option("--part", "which part of the data to evaluate it on (default: test)", choices=PARTS)
        parser.option("--out", f"folder of the ensemble (default: {FOLDER} in FARM)", "FOLDER")
        parser.option("--dry-run", "choose, print what can be told and end")
        parser.trust_option()
        kept = ("data", "data_options", "workers", "threads", "device")
        parser.config_options(only=kept, defaults={"data": "that of the farm"})

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Choose, print what can be told, save the ensemble and evaluate it."""
        folder = FarmFolder.open(own.farm)
        out = Path(own.out or folder.path / FOLDER)
        if not own.dry_run:
            refuse_there(out)
        trained = read_trained(folder)
        found = choose(trained, own.method, own.top)
        console_on(sys.stdout).print(_table(found))
        for name in trained.left_out:
            print(f"left out, as not all of its folds have finished: {printable(name)}")
        print(printable(found.gain.sentence), flush=True)
        if own.dry_run:
            return 0
        record, making = ensemble_of(folder, found, trained.metric, own.trust)
        if own.part in ("train", "validation") and "data" not in given:
            print(
                f"warning: the networks have been trained on samples of the {own.part} part", file=sys.stderr
            )
        config = config_from({**HERE, **given}, dotted, TrainConfig.from_json(record.members[0].config))
        run_job(EnsembleJob(config, record, str(out), own.part, making))
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
