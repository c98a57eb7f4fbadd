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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.errors import BadCheckpoint, BadRunFolder, PeerLost, TuttiError
from tutti.launch.crew import Orders
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.records import checkpoints
from tutti.records.run_folder import RunFolder
from tutti.run.losses import Losses
from tutti.run.shrinking import shrunk, shrunk_text
from tutti.run.train_job import TrainJob, again

STOP: Final = "stop"
SHRINK: Final = "shrink"


def survive(job: TrainJob, placement: Placement, announce: Callable[[str], None] | None) -> object:
    """Run a training job, and go on when ranks are lost; returns what its entry returned on rank 0.

    Args:
        job: with `on_failure` other than "stop".
        placement: its ranks, on this machine.
        announce: as for `start`.

    Raises:
        PeerLost: more ranks were lost than `max_failures` in an hour, or the last one.
        TuttiError: as of `start`.
    """
    with closing(StateMemory()) as memory, last_copy_kept(job, memory.place):
        job = replace(job, memory=memory.place)
        return start(
            job.entry,
            pickle.dumps(job),
            placement,
            announce=announce,
            hang_timeout_s=job.hang_timeout_s,
            succession=_Plan(job, placement, memory),
        )


@contextmanager
def last_copy_kept(job: TrainJob, place: MemoryPlace) -> Iterator[None]:
    """Have the last copy of the state become a checkpoint of the run, if the run fails in this block.

    An exception in the first epoch leaves nothing, as without copies: it would come again.
    """
    try:
        yield
    except TuttiError as error:
        with suppress(BadRunFolder, BadCheckpoint):  # Gone, or of a newer version, which says so when asked.
            folder, lost = place.folder, isinstance(error, PeerLost) or place.losses > 0
            if folder is not None and (lost or RunFolder(folder).begun):
                _write(place, folder / checkpoints.FOLDER, job.config.keep)
        raise


def _write(place: MemoryPlace, folder: Path, keep: int) -> None:
    from tutti.checkpoint.last_copy import write_last_copy  # NumPy would slow every start.

    try:
        write_last_copy(place, folder, keep)
    except OSError as error:
        print(
            f"tutti: warning: the last copy of the state cannot be written to {folder}: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )


class _Plan:
    """The succession of a training job.

    Args:
        job: has the memory's place.
        placement: of its first ranks.
        memory: that of the state.
    """

    def __init__(self, job: TrainJob, placement: Placement, memory: StateMemory) -> None:
        self._job, self._placement, self._memory = job, placement, memory
        self._first, self._workers = job.config, placement.workers
        self._losses = Losses(job.config.max_failures, memory)

    def reserve(self) -> Orders | None:
        """The work of ranks that are ready when one is lost; None: the run has not begun, or wants none."""
        if not self._job.config.standby or not self._memory.place.whole:
            return None
        try:
            job, placement = self._changed(PeerLost([0], ""))
        except PeerLost:
            return None  # The last one has none to go on with.
        job = replace(job, gate=self._memory.shut_gate(), rehearses=True)
        return Orders(pickle.dumps(job), placement, waits=True)

    def after(self, lost: PeerLost) -> Orders:
        """The work of those that go on.

        Raises:
            PeerLost: too many were lost, or all, or their folder.
        """
        self._losses.note(lost)
        before = self._placement.workers
        job, self._placement = self._changed(lost)
        try:
            self._job = again(replace(job, losses=self._losses.count))
        except BadRunFolder as error:
            raise PeerLost(lost.ranks, f"{lost.why}; {error}") from error
        ranks = f"{self._placement.ranks} new rank{'' if self._placement.ranks == 1 else 's'}"
        of_fewer = shrunk_text(job, self._first) if self._placement.workers < before else ""
        print(f"tutti: {lost}; going on with {ranks}{of_fewer}", file=sys.stderr, flush=True)
        waits = bool(self._memory.place.whole)
        gate = self._memory.shut_gate() if waits else None
        return Orders(pickle.dumps(replace(self._job, gate=gate)), self._placement, waits)

    def hand_over(self) -> None:
        """Let those go on that have prepared themselves, unless they will read data into the others' memory.

        What the kernel still does for a process that was killed, such as to read a file, it may finish.
        """
        if self._memory.has_data:
            self.release()

    def release(self) -> None:
        """Let those go on that have prepared themselves, as the others are gone."""
        self._memory.open_gates()

    def _changed(self, lost: PeerLost) -> tuple[TrainJob, Placement]:
        """The job and the ranks to go on with.

        Raises:
            PeerLost: none is left.
        """
        job, placement = self._job, self._placement
        workers = [rank for rank in lost.ranks if rank < placement.workers]
        if job.config.on_failure != SHRINK or not workers:
            return job, placement
        if len(workers) >= placement.workers:
            raise PeerLost(lost.ranks, f"{lost.why}; none is left to go on") from lost
        job = shrunk(job, self._first, self._workers, placement.workers - len(workers))
        return job, job.placement()
