"""`tutti layouts`."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import DOTTED, Parser, Words
from tutti.launch.cores import allowed_cores
from tutti.model_parallel.layout import ranks_of
from tutti.registry import part
from tutti.run.start import run as run_job
from tutti.studies.layouts_job import LayoutsJob

USED = ("data", "parallel", "workers", "batch_size", "optimizer", "lr", "loss", "precision", "seed")
"""The options of a training run that the memory depends on."""


@part("layouts")
class LayoutsCommand(Command):
    """Show how much memory a rank needs under each layout of a model.

    Computes it by a dry run, for the rank of one host that needs the most.
    """

    aim = "find the fastest way to train"
    example = "tutti layouts mlp --data mnist -n 4 --batch-size 256 --model.hidden 4096,4096"

    @override
    def define(self, parser: Parser) -> None:
        defaults = {"parallel": "every layout of these ranks", "lr": "its own"}
        parser.model(required=True)
        parser.config_options(only=(*USED, *DOTTED), defaults=defaults)

    @override
    def run(self, words: Words) -> int:
        config = words.config()
        fixed = ranks_of(config.parallel) if config.parallel is not None else None
        cores = fixed or max(2, allowed_cores().usable)
        ranks = cores if config.workers == "auto" else int(config.workers)
        alone = replace(config, workers="1", parallel=None, parallel_options={})
        run_job(LayoutsJob(alone, ranks, config.parallel, config.parallel_options))
        return 0
