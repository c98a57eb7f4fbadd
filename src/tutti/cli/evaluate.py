"""`tutti evaluate`."""

from __future__ import annotations

import argparse
from typing import Any

from tutti.cli.command import Command
from tutti.cli.options import Parser, add_config_options, add_trust_option, config_from
from tutti.launch.cores import allowed_cores
from tutti.records.run_folder import RunFolder
from tutti.registry import part
from tutti.run.config import Options, TrainConfig
from tutti.run.evaluate_job import PARTS, EvaluateJob
from tutti.run.jobs import run as run_job

KEPT = ("data", "workers", "hosts", "threads", "device")
"""The options of a training run that an evaluation may change."""


def define(parser: Parser) -> None:
    """The run folder, which part, and where to compute."""
    parser.add_argument("run", metavar="RUN", help="the run folder that 'tutti train' wrote")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="test",
        metavar="{" + ",".join(PARTS) + "}",
        help="which part of the data to evaluate (default: test)",
    )
    add_trust_option(parser)
    others = [name for name in TrainConfig.__dataclass_fields__ if name not in (*KEPT, "data_options")]
    add_config_options(
        parser, leave_out=others, defaults=dict.fromkeys(("data", "device"), "that of the run")
    )


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Evaluate; rank 0 prints."""
    given = dict(vars(arguments))
    folder, part = given.pop("run"), given.pop("part")
    other_data = "data" in given or bool(dotted)
    here: dict[str, Any] = {"hosts": None, "servers": 0, "levels": 1, "climb_every": None}
    here |= {"parallel": None, "parallel_options": {}}
    trust = given.pop("trust", False)
    trained = TrainConfig.read(RunFolder.open(folder).path, trust, replaced={*here, *given})
    if other_data and part == "train":
        here["validation"] = 0.0
    if not _fits(trained):
        here |= {"workers": "auto", "threads": None}
    config = config_from({**here, **given}, dotted, trained)
    run_job(EvaluateJob(config, folder, part, other_data))
    return 0


def _fits(config: TrainConfig) -> bool:
    """Tell whether this machine has room for the run's ranks and threads; the figures are then the same."""
    return (
        config.workers.isdecimal() and int(config.workers) * (config.threads or 1) <= allowed_cores().usable
    )


@part("evaluate")
def command() -> Command:
    """Evaluate the network of a run folder."""
    return Command(
        name="evaluate",
        about="Evaluate the network of a run folder: each sample once, with the count, the accuracy of\n"
        "every class and the confusion matrix.",
        example="tutti evaluate runs/2026-01-31-120000-lenet-mnist --part validation",
        define=define,
        run=run,
        dotted=("data_options",),
    )
