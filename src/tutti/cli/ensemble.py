"""`tutti ensemble`."""

from __future__ import annotations

import sys
from pathlib import Path

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.records.farm_folder import FarmFolder
from tutti.records.texts import printable
from tutti.registry import part
from tutti.studies.cross_validation.scores import best_first
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, METHODS, Selection, choose, read_library
from tutti.tables import TextTable
from tutti.terminal import console_on

FOLDER = "ensemble"
"""The default folder of an ensemble, in its farm."""


@part("ensemble")
class EnsembleCommand(Command):
    """Combine models of a cross-validation: do they beat the best?

    Chooses models by their predictions for held-out samples, scores the ensemble on folds that it was not
    chosen by, and saves the networks of all folds together, for 'tutti evaluate' and 'tutti predict'.
    """

    aim = "find the best network"
    example = "tutti ensemble farms/2026-01-31-120000-lenet-mlp-mnist --top 3 --method greedy"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("farm", metavar="FARM", help="the folder that 'tutti cv' wrote")
        parser.option("--top", "combine the K best candidates (default: all)", "K", type=int)
        parser.option("--method", "mean, or greedy selection", default="greedy", choices=tuple(METHODS))
        parser.option("--out", f"folder of the ensemble (default: {FOLDER} in FARM)", "FOLDER")
        parser.option("--dry-run", "choose, print the gain and end")
        parser.trust_option()

    @override
    def run(self, words: Words) -> int:
        """Choose, print the gain, and save the ensemble."""
        own = words.own
        folder = FarmFolder.open(own.farm)
        out = Path(own.out or folder.path / FOLDER)
        if not own.dry_run and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise BadOption(f"{out} exists already; name another folder with --out, or delete it")
        library, left_out = read_library(folder)
        chosen = choose(library, folder.plan.question["ratios"], own.method, own.top)
        console_on(sys.stdout).print(_table(chosen))
        for name in left_out:
            print(f"left out, as not all folds have finished: {printable(name)}")
        print(printable(chosen.gain.sentence), flush=True)
        if own.dry_run:
            return 0
        from tutti.studies.ensemble.making import ensemble_of, save_ensemble  # Import torch.

        record, places = ensemble_of(folder, chosen, own.method, own.trust)
        save_ensemble(out, record, places)
        print(f"{out}: {len(record.members)} networks; to evaluate it: tutti evaluate {out}")
        return 0


def _table(found: Selection) -> TextTable:
    """Return the table of all candidates, the ensemble and the best single model."""
    score = found.gain.score
    table = TextTable(["candidate", "weight", str(score), "deviation"])
    named = [name for name in best_first(found.scores) if name not in (ENSEMBLE, BEST)]
    for name in [*named, BEST, ENSEMBLE]:
        one = found.scores[name]
        weight = f"{found.weights[name]:.3f}" if name in found.weights else ""
        called = name if name in named else f"{name}, chosen on other folds"
        table.add_row(called, weight, score.text(one.mean), score.text(one.deviation))
    return table
