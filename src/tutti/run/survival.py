"""Training that goes on when a rank is lost: new ranks take over the last copy of the state in memory.

    launching process   starts ranks ─────────── rank 1 is lost, the others are ended ── starts ranks ───────
    ranks               train, copy, train, copy ✝                                        load, train ...
    memory              ────────────────1──────2──────────────────────────────────────────2──────────────

All that a copy does not have is trained again, with the same samples and random numbers: as many ranks end
with the weights that they would have had. The fork server of the ranks has all imported, and stays.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Final

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import PeerLost
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.run.resume import Resume
from tutti.run.train_job import TrainJob

STOP: Final = "stop"
SHRINK: Final = "shrink"

HOUR_S: Final = 3600.0


def survive(job: TrainJob, placement: Placement, announce: Callable[[str], None] | None) -> object:
    """Run a training job, again and again if ranks are lost; returns what its entry returned on rank 0.

    Args:
        job: with `on_failure` other than "stop".
        placement: its ranks, on this machine.
        announce: as for `start`.

    Raises:
        PeerLost: more ranks were lost than `max_failures` in an hour, or the last one.
        TuttiError: as of `start`.
    """
    times: deque[float] = deque()
    with closing(StateMemory()) as memory:
        while True:
            sent = replace(job, memory=memory.place, losses=len(times))
            try:
                return start(
                    job.entry,
                    pickle.dumps(sent),
                    placement,
                    announce=announce,
                    apart=True,
                    hang_timeout_s=job.hang_timeout_s,
                )
            except PeerLost as lost:
                now = time.monotonic()
                times.append(now)
                recent = sum(now - one < HOUR_S for one in times)
                if recent > job.config.max_failures:
                    raise PeerLost(lost.ranks, f"{lost.why}; it was loss {recent} within an hour") from lost
                job, placement = _changed(job, placement, lost)
                announce = None
                ranks = f"{placement.ranks} new rank{'' if placement.ranks == 1 else 's'}"
                print(f"tutti: {lost}; going on with {ranks}", file=sys.stderr, flush=True)
            if job.resume is None and (folder := memory.place.folder) is not None:
                job = replace(job, resume=Resume(folder, auto=True, again=True))


def _changed(job: TrainJob, placement: Placement, lost: PeerLost) -> tuple[TrainJob, Placement]:
    """The job and the ranks to go on with.

    Raises:
        PeerLost: none is left.
    """
    workers = [rank for rank in lost.ranks if rank < placement.workers]
    if job.config.on_failure != SHRINK or not workers:
        return job, placement
    if len(workers) >= placement.workers:
        raise PeerLost(lost.ranks, f"{lost.why}; none is left to go on") from lost
    fewer = job.config.changed({"workers": str(placement.workers - len(workers))})
    job = replace(job, config=fewer)
    return job, job.placement()
