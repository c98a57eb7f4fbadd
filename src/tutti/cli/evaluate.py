"""`tutti evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, config_from
from tutti.errors import BadOption
from tutti.records.ensemble import ENSEMBLE
from tutti.registry import part
from tutti.run.config import Options, TrainConfig
from tutti.run.start import run as run_job
from tutti.run.train_job import PARTS, EvaluateJob
from tutti.run.trained_run import ELSEWHERE, find_run
from tutti.studies.ensemble.evaluation_job import EnsembleJob, read_trusted


@part("evaluate")
class EvaluateCommand(Command):
    """Evaluate the network of a run folder, or an ensemble.

    Each sample once, with the count, the accuracy of every class and the confusion matrix.
    """

    aim = "use a trained network"
    example = "tutti evaluate runs/2026-01-31-120000-lenet-mnist --part validation"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument(
            "folder", metavar="RUN", help="a run folder, one of its checkpoints, or the folder of an ensemble"
        )
        which = "which part of the data to evaluate (default: test, or all of other data without parts)"
        parser.option("--part", which, choices=PARTS)
        of = (
            "what to evaluate in place of the run's final weights: a checkpoint, or what 'tutti export' reads"
        )
        parser.option("--weights", of, "PLACE")
        parser.trust_option()
        kept = ("data", "data_options", "workers", "hosts", "threads", "device")
        parser.config_options(only=kept, defaults=dict.fromkeys(("data", "device"), "that of the run"))

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        if (Path(own.folder) / ENSEMBLE).is_file():
            _evaluate_ensemble(own, given, dotted)
            return 0
        other_data = "data" in given or bool(dotted)
        here: dict[str, Any] = {"test": 0.0} if other_data else {}
        here |= {"hosts": None, "servers": 0, "levels": 1, "server_period": None}
        here |= {"weights": None, "parallel": None, "parallel_options": {}, "predictions": False}
        run = find_run(own.folder, own.trust, own.weights, {*here, *given})
        trained = run.config
        # A run on a split leaves the test part for later: that is now.
        part = own.part or (None if other_data else "test")
        left = part == "test" and trained.split is not None
        if other_data or left:
            here["split"] = None
        if other_data and part in (None, "train"):
            here["validation"] = 0.0
        here |= {"workers": "auto", "threads": None}
        config = config_from({**here, **given}, dotted, trained)
        other = other_data or left
        run_job(EvaluateJob(config, str(run.folder), part, str(run.weights), other))
        return 0


def _evaluate_ensemble(own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> None:
    if own.weights is not None:
        raise BadOption("--weights is for a single network; an ensemble has those of its members")
    record = read_trusted(Path(own.folder), own.trust)
    other = "data" in given or bool(dotted)
    whole = {"validation": 0.0} if other and own.part in (None, "train") else {}
    trained = TrainConfig.from_json(record.members[0].config)
    config = config_from({**ELSEWHERE, **whole, **given}, dotted, trained)
    run_job(EnsembleJob(config, own.folder, own.part, other, own.trust))
