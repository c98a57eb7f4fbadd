"""The start of a job's ranks. Needs no torch."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Final

from tutti.launch.launcher import Launcher, started_by
from tutti.launch.start import start
from tutti.load_object import find_file
from tutti.models import names_file
from tutti.run.config import STOP, TrainConfig
from tutti.run.jobs import Job
from tutti.run.survival import survive
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr

CODE: Final = (
    "model",
    "data",
    "strategy",
    "optimizer",
    "schedule",
    "loss",
    "metrics",
    "augment",
    "callbacks",
)
"""The fields that may name Python files."""


def run(job: Job) -> object:
    """Refuse what cannot be done, announce the placement, and run the job's entry on every rank.

    Returns:
        What the entry returned on rank 0; None when rank 0 ran on another host.
    """
    placement = job.placement()
    job.check(placement)
    if started_by().launcher is Launcher.ALONE and job.config.hosts is None:
        check_files(job.config)
    say = announce if job.announced and not job.quiet else None
    if placement.hosts:
        job = replace(job, objects={field: one.in_band() for field, one in job.objects.items()})
    if isinstance(job, TrainJob) and job.config.on_failure != STOP:
        return survive(job, placement, say)
    hang_timeout_s = job.hang_timeout_s if isinstance(job, TrainJob) else None
    return start(job.entry, pickle.dumps(job), placement, announce=say, hang_timeout_s=hang_timeout_s)


def check_files(config: TrainConfig) -> None:
    """Refuse files of code and of models that the configuration names and that are not there."""
    for field in CODE:
        for name in str(getattr(config, field)).split(","):
            where = name.rpartition(":")[0].strip()
            if where.endswith(".py"):
                find_file(where, name.strip(), field)
    if names_file(config.model):
        find_file(config.model, config.model, "model")


def announce(line: str) -> None:
    """Print the plan to stdout, and its warnings to stderr."""
    if line.startswith("warning: "):
        say_on_stderr(line)
    else:
        print(f"plan: {line}", flush=True)
