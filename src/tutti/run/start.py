"""The start of a job's ranks, after the checks that may precede it. Needs no torch by itself."""

from __future__ import annotations

import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.load_object import find_file, names_object
from tutti.models import names_file
from tutti.records.untrusted import open_file
from tutti.run.config import DATA_SETS, STOP, TrainConfig
from tutti.run.jobs import Job
from tutti.run.survival import survive
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr

CODE: Final = {
    "model": "model",
    "data": "data set",
    "strategy": "strategy",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "loss": "loss",
    "metrics": "metric",
    "augment": "augmentation",
    "callbacks": "callback",
}
"""The fields that may name Python files, and what those hold."""


def run(job: Job) -> object:
    """Refuse what cannot be done, announce the placement, and run the job's entry on every rank.

    Returns:
        What the entry returned on rank 0; None when rank 0 ran on another host.

    Raises:
        TuttiError: the input is wrong, or a rank failed.
    """
    placement = job.placement()
    job.check(placement)
    if started_by().launcher is Launcher.ALONE:
        if job.config.hosts is None:
            check_files(job.config)
        _check_with_torch(job, placement)
    say = announce if job.announced and not job.quiet else None
    if placement.hosts:
        job = replace(job, objects={field: one.in_band() for field, one in job.objects.items()})
    with job.started() as sent:
        if isinstance(sent, TrainJob) and sent.config.on_failure != STOP:
            return survive(sent, placement, say)
        hang_timeout_s = sent.hang_timeout_s if isinstance(sent, TrainJob) else None
        return start(job.entry, pickle.dumps(sent), placement, announce=say, hang_timeout_s=hang_timeout_s)


def _check_with_torch(job: Job, placement: Placement) -> None:
    """Refuse what no rank could mend.

    That takes torch. Where this process has not imported it the ranks find out for themselves: they are there
    as soon as it would be here. Servers and further hosts take longer, and without data none are needed.

    Raises:
        UserError: a name or an option is wrong, or the job does not fit these ranks.
    """
    slow = placement.servers or len(placement.hosts) > 1
    if "torch" in sys.modules or slow or (job.config.hosts is None and _has_no_data(job.config.data)):
        from tutti.run.checks import check_job

        check_job(job, placement.ranks, max(1, len(placement.hosts)))


def check_files(config: TrainConfig) -> None:
    """Refuse files of code and of models that the configuration names and that are not there.

    Raises:
        BadOption: the message names the file.
    """
    for field, kind in CODE.items():
        for name in str(getattr(config, field)).split(","):
            where = name.rpartition(":")[0].strip()
            if where.endswith(".py"):
                find_file(where, name.strip(), kind)
    if names_file(config.model):
        find_file(config.model, config.model, "model")


def _has_no_data(name: str) -> bool:
    """Tell whether there is nothing of this name, or a file that begins as a text, as no data set does."""
    path = Path(name).expanduser()
    if name in DATA_SETS or names_object(name) or path.is_dir():
        return False
    try:
        with open_file(path) as file:
            return re.fullmatch(rb"[\t\n\r -~]*", file.read(4)) is not None
    except OSError:
        return True


def announce(line: str) -> None:
    """Print the plan to stdout, and its warnings to stderr."""
    if line.startswith("warning: "):
        say_on_stderr(line)
    else:
        print(f"plan: {line}", flush=True)
