"""`tutti evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.records.ensemble import ENSEMBLE
from tutti.registry import part
from tutti.run.start import run as run_job
from tutti.run.train_job import PARTS, EvaluateJob
from tutti.run.trained_run import ELSEWHERE, find_run
from tutti.studies.ensemble.evaluation_job import EnsembleJob, config_of_members


@part("evaluate")
class EvaluateCommand(Command):
    """Evaluate the network of a run folder, or an ensemble.

    Counts each sample once; shows the metrics, the accuracy of every class and the confusion matrix.
    """

    aim = "use a trained network"
    example = "tutti evaluate runs/2026-01-31-120000-lenet-mnist --part validation"

    @override
    def define(self, parser: Parser) -> None:
        parser.trained_options("evaluate", PARTS, device="that of the run")

    @override
    def run(self, words: Words) -> int:
        own, other = words.own, words.other_data
        here: dict[str, Any] = dict(ELSEWHERE)
        if other:
            here |= {"test": 0.0, **({"validation": 0.0} if own.part in (None, "train") else {})}
        if (Path(own.place) / ENSEMBLE).is_file():
            trained = config_of_members(Path(own.place), own.trust, own.weights)
            config = words.config(trained.changed(here))
            run_job(EnsembleJob(config, own.place, own.part, other, own.trust))
            return 0
        run = find_run(own.place, own.trust, own.weights, {*here, *words.given})
        here["strategy"] = run.config.strategy  # A run on one rank is evaluated on one rank.
        part = own.part or (None if other else "test")
        # A run on a split has left the test part for later.
        left = part == "test" and run.config.split is not None
        if not (other or left):
            here["split"] = run.config.split
        config = words.config(run.config.changed(here))
        run_job(EvaluateJob(config, str(run.folder), part, str(run.weights), other or left))
        return 0
