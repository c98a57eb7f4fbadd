"""`tutti predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.records.ensemble import ENSEMBLE
from tutti.registry import part
from tutti.run.start import run as run_job
from tutti.run.train_job import PARTS, SUFFIXES, PredictJob
from tutti.run.trained_run import ELSEWHERE, UNUSED, find_run
from tutti.studies.ensemble.evaluation_job import EnsemblePredictJob, config_of_members


@part("predict")
class PredictCommand(Command):
    """Write the predictions of a network or an ensemble for each sample.

    Writes the class and the probability of each class, or the predicted numbers, in the order of the data.
    The data need no targets.
    """

    aim = "use a trained network"
    example = "tutti predict runs/2026-01-31-120000-mlp-iris --data new.csv -o predictions.csv"

    @override
    def define(self, parser: Parser) -> None:
        parser.option("-o, --out", f"the file to write, which ends in {', '.join(SUFFIXES)}", "FILE")
        parser.option("--overwrite", "replace the file if it exists")
        parser.trained_options("predict", PARTS, device="cpu")

    @override
    def run(self, words: Words) -> int:
        own, other = words.own, words.other_data
        if own.out is None:
            raise BadOption("no file is named; give one with -o, such as -o predictions.csv")
        here: dict[str, Any] = {**ELSEWHERE, "device": "cpu", "predictions": not other}
        kind: type[PredictJob] = PredictJob
        if (Path(own.place) / ENSEMBLE).is_file():
            kind, trained = EnsemblePredictJob, config_of_members(Path(own.place), own.trust, own.weights)
        else:
            # By default the data are those of the run.
            unused = UNUSED if other else UNUSED - {"data", "data_options"}
            trained = find_run(own.place, own.trust, own.weights, unused).config
            if not other and own.part in ("train", "validation"):
                here["split"] = trained.split
        config = words.config(trained.changed(here))
        run_job(kind(config, own.place, own.out, own.part, other, own.weights, own.trust, own.overwrite))
        return 0
