"""`tutti train`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from tutti.cli.command import Command, writable
from tutti.cli.options import Parser, Words
from tutti.errors import EXIT_INTERRUPTED, BadOption
from tutti.launch.launcher import started_by
from tutti.models import FILES, MODELS
from tutti.registry import part
from tutti.reports.advice import past_the_best, rare_class, where_the_time_went
from tutti.run.config import TrainConfig
from tutti.run.resume import Resume, going_on, placed
from tutti.run.start import run as run_job
from tutti.run.train_job import RunOutcome, TrainJob, outcome_again


@part("train")
class TrainCommand(Command):
    """Train a network in parallel.

    Trains on every core of this machine, or on several machines.

    Prints the plan, the progress, and the accuracy on the test part. Writes a run folder with the full
    configuration (which alone repeats the run), the history and the weights.
    """

    aim = "train a network"
    example = "tutti train lenet --data mnist --epochs 5 --schedule one_cycle --lr 0.003 -n 2"

    @override
    def define(self, parser: Parser) -> None:
        models = (
            f"built-in model ({', '.join(MODELS)}), package.module:factory, file.py:factory, or a file with "
            f"a whole model ({', '.join(f'*{kind}' for kind in FILES)})"
        )
        parser.model(help=f"{models} (default: cnn)")
        parser.option(
            "--config",
            "repeat the run of this config.json (or of this run folder); other options change it",
            "FILE",
        )
        parser.option(
            "--resume",
            "continue this run (its folder, or that of a checkpoint) from the newest checkpoint; auto: the "
            "run in --out, or begin it",
            "RUN",
        )
        parser.option(
            "--plan",
            "choose the fastest ranks, threads, layout and precision on this machine, unless they are given; "
            "bf16 only if its loss follows that of fp32. auto: use the plan that is remembered for this "
            "model, batch and machine, or measure for at most a twentieth of the run; fresh: measure",
            choices=("auto", "fresh"),
        )
        parser.option("--budget", "the most time that --plan measures", "SECONDS", 20.0, type=float)
        parser.group_option("part")
        parser.trust_option()
        parser.option(
            "--trace",
            "write a timeline of all ranks to trace.json in the run folder (trace-2.json after --resume), "
            "for https://ui.perfetto.dev",
        )
        parser.option("--dry-run", "print the plan and end: start no rank, write no run folder")
        parser.option("--json", "with --dry-run: file for the configuration with every default", "FILE")
        parser.config_options()

    @override
    def run(self, words: Words) -> int:
        began, own = time.time(), words.own
        resume = None if own.resume is None else Resume.find(own.resume, words.given.get("out"))
        if resume is not None:
            config = _resumed(words, resume)
            if resume.goes_on and outcome_again(resume, config) is not None:
                return 0
            words.given["precision"] = config.precision
        else:
            config = config_of(words)
        if own.dry_run:
            if own.plan is not None:
                raise BadOption(f"--dry-run starts no rank, and --plan {own.plan} does; leave one out")
            # Imported here, as it slows the start.
            from tutti.studies.dry_run_job import dry_run

            file = None if own.json is None else str(writable(Path(own.json), "--json"))
            dry_run(TrainJob(config, trace=own.trace, resume=resume), file)
            return 0
        if own.json is not None:
            raise BadOption("--json needs --dry-run; a run writes config.json to its folder")
        with ExitStack() as stack:
            data = None
            if own.plan is not None:
                # Imported here, as it slows the start.
                from tutti.studies.autotune.plan import planned

                way = planned(config, words.given, own.budget, fresh=own.plan == "fresh")
                config, data = stack.enter_context(way)
            outcome = run_job(TrainJob(config, trace=own.trace, resume=resume, began=began, data=data))
        if isinstance(outcome, RunOutcome) and outcome.stopped is not None:
            return EXIT_INTERRUPTED
        if isinstance(outcome, RunOutcome) and outcome.summary is not None and started_by().rank == 0:
            resolved = outcome.config.as_json()
            slow = where_the_time_went(outcome.history, resolved)
            rare = rare_class(outcome.summary, outcome.data.labels, resolved)
            for sentence in filter(None, (slow, past_the_best(outcome.history, resolved), rare)):
                print(f"advice: {sentence}")
        return 0


def config_of(words: Words) -> TrainConfig:
    """Return the configuration of --config, changed by the other options."""
    own = words.own
    base = None if own.config is None else TrainConfig.read(own.config, own.trust, replaced=words.given)
    return words.config(base)


def _resumed(words: Words, resume: Resume) -> TrainConfig:
    """Return the configuration of a resumed run; refuse options that cannot change."""
    own, given = words.own, words.given
    if own.config is not None:
        raise BadOption("--resume uses the configuration of the run; leave --config out")
    before = TrainConfig.read(resume.folder, own.trust, replaced=given)
    now = replace(words.config(placed(before, given)), out=str(resume.folder))
    # Before the first checkpoint all options may change.
    return going_on(before, now) if resume.goes_on else now
