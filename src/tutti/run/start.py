"""The start of a job's ranks, after the checks that may precede it. Needs no torch by itself."""

from __future__ import annotations

import pickle
import sys

from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.run.jobs import Job


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
        _check_with_torch(job, placement)
    say = announce if job.announced and not job.quiet else None
    with job.started() as sent:
        return start(job.entry, pickle.dumps(sent), placement, announce=say)


def _check_with_torch(job: Job, placement: Placement) -> None:
    """Refuse what no rank could mend.

    That takes torch. Where this process has not imported it the ranks find out for themselves: they are there
    as soon as it would be here. Servers and further hosts take longer.

    Raises:
        UserError: a name or an option is wrong, or the job does not fit these ranks.
    """
    if "torch" in sys.modules or placement.servers or len(placement.hosts) > 1:
        from tutti.run.checks import check_job

        check_job(job, placement.ranks, max(1, len(placement.hosts)))


def announce(line: str) -> None:
    """Print the plan to stdout, and its warnings to stderr."""
    if line.startswith("warning: "):
        print(f"tutti: {line}", file=sys.stderr, flush=True)
    else:
        print(f"plan: {line}", flush=True)
