"""The start of a job's ranks. Needs no torch."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.errors import TuttiError
from tutti.launch.launcher import started_by
from tutti.launch.placement import Placement
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import StopRequests, note_early
from tutti.launch.supervisor import Recovery, Replaced
from tutti.records import checkpoints
from tutti.run.config import STOP
from tutti.run.jobs import Job
from tutti.run.names import check_here
from tutti.run.recovery_policy import RecoveryPolicy
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr, warn_on_stderr


def run(job: Job) -> object:
    """Check a job, announce its placement, and run it; return rank 0's result, None if it ran elsewhere."""
    placement = job.placement()
    job.check(placement)
    # Other data have the columns of the training data.
    check_here(job, not getattr(job, "other_data", False))
    if isinstance(job, TrainJob) and job.write and started_by().given:
        note_early()
    say = announce if job.announced and not job.quiet else None
    if placement.hosts:
        job = replace(job, objects={field: one.in_band() for field, one in job.objects.items()})
    if isinstance(job, TrainJob) and job.config.on_failure != STOP:
        return survive(job, placement, say)
    hang_timeout_s = job.hang_timeout_s if isinstance(job, TrainJob) else None
    # Earlier ranks came from a process that has imported torch, and still forks.
    forks = isinstance(job, TrainJob) and job.data is not None and "torch" not in sys.modules
    return start(
        job.entry,
        pickle.dumps(job),
        placement,
        announce=say,
        hang_timeout_s=hang_timeout_s,
        in_process=not forks,
    )


def announce(line: str) -> None:
    """Print the plan to stdout, and its warnings to stderr."""
    if line.startswith("warning: "):
        say_on_stderr(line)
    else:
        print(f"plan: {line}", flush=True)


def survive(job: TrainJob, placement: Placement, announce: Callable[[str], None] | None) -> object:
    """Run a training job that survives lost ranks: new ranks start from the last copy of the state."""
    result: object = None
    with (
        SignalWatch() as signals,
        closing(StateMemory()) as memory,
        _last_copy_kept(memory.place, job.config.keep),
    ):
        stopping = StopRequests(signals)
        policy = RecoveryPolicy(replace(job, memory=memory.place), placement, memory, stopping)
        recovery = Recovery(stopping, policy.is_due)
        while not stopping.ended_by:
            try:
                result = start(
                    job.entry,
                    pickle.dumps(policy.job),
                    policy.placement,
                    announce=announce,
                    hang_timeout_s=job.hang_timeout_s,
                    recovery=recovery,
                )
                break
            except Replaced:
                policy.resize()
            except TuttiError as end:
                policy.go_on_after(end)
            announce = None
    stopping.act()
    return result


@contextmanager
def _last_copy_kept(place: MemoryPlace, keep: int) -> Iterator[None]:
    """Write the last copy of the state as a checkpoint of the run, if the run fails in this block."""
    try:
        yield
    except TuttiError:
        try:
            if place.folder is not None:
                place.write_last(place.folder / checkpoints.FOLDER, keep)
        except OSError as error:
            warn_on_stderr(f"no checkpoint was made of the last copy of the state, which is lost: {error}")
        raise
