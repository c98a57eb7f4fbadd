"""Training that goes on when a rank is lost: new ranks start from the last copy of the state in memory.

    launching process   starts ranks ─────────── rank 1 is lost, the others are ended ── starts ranks ───────
    ranks               train, copy, train, copy ✝                                        load, train ...
    memory              ────────────────1──────2──────────────────────────────────────────2──────────────

What was trained after the copy is trained again, with the same samples and random numbers: the same number of
ranks ends with the weights that it would have had. On one machine the new ranks come from the fork server of
the old ones, which has imported everything; over hosts they come from a new mpirun. A resize takes the same
way, after a copy that was asked for (`tutti.run.recovery_policy`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.errors import BadCheckpoint, BadRunFolder, TuttiError
from tutti.launch.placement import Placement
from tutti.launch.recovery import Recovery, Replaced
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import StopRequests
from tutti.records import checkpoints
from tutti.run.recovery_policy import RecoveryPolicy
from tutti.run.train_job import TrainJob
from tutti.terminal import warn_on_stderr


def survive(job: TrainJob, placement: Placement, announce: Callable[[str], None] | None) -> object:
    """Run a training job, and go on when ranks are lost; returns what its entry returned on rank 0."""
    with SignalWatch() as signals:
        stopping = StopRequests(signals)
        result = _survive(job, placement, announce, stopping)
    stopping.act()
    return result


def _survive(
    job: TrainJob, placement: Placement, announce: Callable[[str], None] | None, stopping: StopRequests
) -> object:
    """Do the same; returns None once a signal has ended everything."""
    with ExitStack() as stack:
        memory = stack.enter_context(closing(StateMemory()))
        stack.enter_context(_last_copy_kept(job, memory.place))
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
            except Replaced:
                policy.resize()
            except TuttiError as end:
                policy.go_on_after(end)
            else:
                policy.finish()
                return result
            announce = None
    return None


@contextmanager
def _last_copy_kept(job: TrainJob, place: MemoryPlace) -> Iterator[None]:
    """Write the last copy of the state as a checkpoint of the run, if the run fails in this block."""
    try:
        yield
    except TuttiError:
        try:
            if place.folder is not None:
                place.write_last_copy(place.folder / checkpoints.FOLDER, job.config.keep)
        except (OSError, BadRunFolder, BadCheckpoint) as error:
            warn_on_stderr(f"no checkpoint was made of the last copy of the state, which is lost: {error}")
        raise
