"""The job of a dry run. Needs no torch: the launching process imports it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tutti.errors import BadOption
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.names import check_here
from tutti.run.start import announce
from tutti.run.start import run as run_job
from tutti.run.train_job import TrainJob


@dataclass(frozen=True)
class DryRunJob(Job):
    """A check of a run that is not made, by one rank: this process."""

    entry: ClassVar[str] = "tutti.studies.dry_run:work"
    announced: ClassVar[bool] = False

    planned: TrainJob
    ranks: Placement  # of the run
    file: str | None  # for the configuration with every default filled in; None: it is not written


def dry_run(job: TrainJob, file: str | None = None) -> None:
    """Check a run, print its plan, and write its configuration to a file."""
    launcher = started_by().launcher
    if launcher is not Launcher.ALONE:
        raise BadOption(f"--dry-run looks at a run in one process; leave {launcher.value} out")
    check_here(job)
    placement = job.placement()
    job.check(placement)
    for line in (placement.describe(), *(f"warning: {one}" for one in placement.warnings)):
        announce(line)
    run_job(DryRunJob(alone(job.config), job, placement, file))


def alone(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the same model and data on one rank of this host."""
    return replace(
        config,
        workers="1",
        hosts=None,
        servers=0,
        levels=1,
        server_period=None,
        parallel=None,
        parallel_options={},
        balance="none",
        strategy="solo",
        strategy_options={},
    )
