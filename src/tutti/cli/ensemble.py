"""`tutti ensemble`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, config_from
from tutti.errors import BadOption
from tutti.records.ensemble import EnsembleRecord
from tutti.records.farm_folder import FARM, FarmFolder
from tutti.records.run_folder import CONFIG, RunFolder
from tutti.records.untrusted import printable
from tutti.registry import part
from tutti.run.config import Options, TrainConfig
from tutti.run.start import run as run_job
from tutti.run.train_job import PARTS
from tutti.run.trained_run import ELSEWHERE
from tutti.studies.cross_validation.scores import MEASURES, Scores
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, Choice, choose, read_trained
from tutti.studies.ensemble.combining import METHODS
from tutti.studies.ensemble.evaluation_job import EnsembleJob, Making
from tutti.studies.ensemble.making import FOLDER, ensemble_of, refuse_there, snapshots_of
from tutti.tables import TextTable
from tutti.terminal import console_on


@part("ensemble")
class EnsembleCommand(Command):
    """Combine models of a cross-validation: do they beat the best?

    Chooses by what each model predicts for the samples that it never saw, and scores the ensemble on
    folds that it was not chosen by. Saves the networks of all folds as one thing, and evaluates that on
    new samples. Of a run its checkpoints are combined: a snapshot ensemble.
    """

    aim = "find the best network"
    example = "tutti ensemble farms/2026-01-31-120000-lenet-mlp-mnist --top 3 --method greedy"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("farm", metavar="FARM", help="the folder that 'tutti cv' or 'tutti train' wrote")
        top = "combine the K best candidates, or the K newest checkpoints of a run (default: all)"
        parser.option("--top", top, "K", type=int)
        how = "mean, or greedy selection (default: greedy)"
        parser.option("--method", how, choices=tuple(METHODS))
        parser.option("--part", "which part of the data to evaluate it on (default: test)", choices=PARTS)
        parser.option("--out", f"folder of the ensemble (default: {FOLDER} in FARM)", "FOLDER")
        parser.option("--dry-run", "choose, print what can be told and end")
        parser.trust_option()
        kept = ("data", "data_options", "workers", "threads", "device")
        parser.config_options(only=kept, defaults={"data": "that of the farm"})

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        """Choose, print what can be told, save the ensemble and evaluate it."""
        place = Path(own.farm)
        out = Path(own.out or place / FOLDER)
        if not own.dry_run:
            refuse_there(out)
        of_run = (place / CONFIG).is_file() and not (place / FARM).exists()
        record, making = _snapshots(own) if of_run else _candidates(own)
        if own.dry_run:
            return 0
        seen = ["train"] if of_run else ["train", "validation"]
        if own.part in seen and "data" not in given:
            print(
                f"tutti: warning: the networks have trained on samples of the {own.part} part",
                file=sys.stderr,
            )
        config = config_from({**ELSEWHERE, **given}, dotted, TrainConfig.from_json(record.members[0].config))
        run_job(EnsembleJob(config, record, str(out), own.part, making))
        return 0


def _candidates(own: argparse.Namespace) -> tuple[EnsembleRecord, Making]:
    """Choose candidates of a cross-validation, and print what can be told."""
    folder = FarmFolder.open(own.farm)
    trained = read_trained(folder)
    found = choose(trained, own.method or "greedy", own.top)
    console_on(sys.stdout).print(_table(found))
    for name in trained.left_out:
        print(f"left out, as not all of its folds have finished: {printable(name)}")
    print(printable(found.gain.sentence), flush=True)
    return ensemble_of(folder, found, trained.metric, own.trust)


def _snapshots(own: argparse.Namespace) -> tuple[EnsembleRecord, Making]:
    """Take the checkpoints of a run, and print which."""
    if own.method not in (None, "mean"):
        raise BadOption(
            f"--method {own.method} is for candidates of a cross-validation; of the checkpoints of a run "
            "there is the mean"
        )
    record, making = snapshots_of(RunFolder.open(own.farm), own.top, own.trust)
    print(f"snapshots: {', '.join(one.candidate for one in record.members)}", flush=True)
    return record, making


def _table(found: Choice) -> TextTable:
    """Return the table of all candidates with their weights, and of the two that are compared."""
    metric = found.scores[ENSEMBLE].metric
    table = TextTable(["candidate", "weight", metric, "deviation"])
    made = found.combination
    shown = [f"{weight:.3f}" for weight in made.weights]
    weights = dict(zip(made.candidates, shown, strict=True))
    named = [name for name in found.scores if name not in (ENSEMBLE, BEST)]
    sign = -1 if MEASURES[metric].better == "higher" else 1
    for name in [*sorted(named, key=lambda name: sign * found.scores[name].mean), BEST, ENSEMBLE]:
        one = found.scores[name]
        called = name if name in named else f"{name}, chosen on other folds"
        table.add_row(called, weights.get(name, ""), _figure(one.mean, one), _figure(one.deviation, one))
    return table


def _figure(value: float, scores: Scores) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.2%}" if MEASURES[scores.metric].share else f"{value:.4g}"
