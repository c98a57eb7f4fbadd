"""Training that goes on when a rank is lost: new ranks take over the last copy of the state in memory.

    launching process   starts ranks ─────────── rank 1 is lost, the others are ended ── starts ranks ───────
    ranks               train, copy, train, copy ✝                                        load, train ...
    memory              ────────────────1──────2──────────────────────────────────────────2──────────────

All that a copy does not have is trained again, with the same samples and random numbers: as many ranks end
with the weights that they would have had. The fork server of the ranks has all imported, and stays.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.errors import BadCheckpoint, BadRunFolder, PeerLost, TuttiError, UserError
from tutti.launch.crew import Orders
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.records import checkpoints
from tutti.run.config import SHRINK
from tutti.run.lineup import Lineup, ranks_text
from tutti.run.losses import Losses
from tutti.run.resize_answers import ResizeAnswers
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr, warn_on_stderr

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, or of which a user has had his share."""


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
        with closing(_Plan(Lineup(job, placement, memory))) as plan:
            return start(
                job.entry,
                pickle.dumps(job),
                placement,
                announce=announce,
                hang_timeout_s=job.hang_timeout_s,
                succession=plan,
            )


@contextmanager
def last_copy_kept(job: TrainJob, place: MemoryPlace) -> Iterator[None]:
    """Write the last copy of the state as a checkpoint of the run, if the run fails in this block."""
    try:
        yield
    except TuttiError:
        try:
            folder = place.folder
            if folder is not None:
                _write(place, folder / checkpoints.FOLDER, job.config.keep)
        except BadRunFolder as gone:
            if place.whole:
                warn_on_stderr(f"the last copy of the state is lost, as no checkpoint was made of it: {gone}")
        except BadCheckpoint:
            pass  # Of a newer version, which says so when asked.
        raise


def _write(place: MemoryPlace, folder: Path, keep: int) -> None:
    from tutti.checkpoint.last_copy import write_last_copy  # NumPy would slow every start.

    try:
        write_last_copy(place, folder, keep)
    except OSError as error:
        mend = "free some room" if error.errno in _FULL else "mend that"
        there = None
        with suppress(OSError, BadCheckpoint):
            there, _ = checkpoints.newest(folder)
        if there is None:
            left = (
                f"all that was trained: there is no checkpoint to go on from; {mend}, and begin the run again"
            )
        else:
            step = there.manifest.step
            left = f"all that was trained since step {step:,}; {mend} before the run goes on from there"
        warn_on_stderr(
            f"the last copy of the state cannot be written to {folder}: {error.strerror}; it was nowhere "
            f"but in the memory of this process, and is lost with it, as is {left}"
        )


class _Plan:
    """The succession of a training job.

    Args:
        lineup: its first ranks.

    Attributes:
        others: whom somebody has asked for, by `tutti resize`.
    """

    def __init__(self, lineup: Lineup) -> None:
        self._lineup, self._memory = lineup, lineup.memory
        self._losses = Losses(lineup.job.config.max_failures, lineup.memory)
        self.others = ResizeAnswers(lineup)

    def close(self) -> None:
        """Answer nobody any more."""
        self.others.close()

    def reserve(self) -> Orders | None:
        """The work of ranks that are ready when one is lost; None: the run has not begun, or wants none."""
        if not self._lineup.job.config.standby or not self._memory.place.whole:
            return None
        try:
            job, placement = self._changed(PeerLost([0], ""))
        except PeerLost:
            return None  # The last one has none to go on with.
        return self._lineup.in_reserve(job, placement)

    def after(self, lost: PeerLost) -> Orders:
        """The work of those that go on.

        Raises:
            PeerLost: too many were lost, or all, or their folder.
        """
        self._losses.note(lost)
        self.others.note_loss()
        before = self._lineup.placement.workers
        try:
            job, placement = self._changed(lost)
            batch = self._lineup.change_to(job, placement, str(lost))
        except UserError as error:
            raise lost.adding(str(error)) from error
        of_fewer = batch if placement.workers < before else ""
        going_on = f"going on with {ranks_text(placement.workers, 'new rank')}{of_fewer}"
        say_on_stderr(f"{lost}; {going_on}")
        waits = bool(self._memory.place.whole)
        gate = self._memory.shut_gate() if waits else None
        return Orders(pickle.dumps(replace(self._lineup.job, gate=gate)), placement, waits)

    def release(self) -> None:
        """Let those go on that have prepared themselves, as the others are gone."""
        self._memory.open_gates()
        self.others.forget()

    def _changed(self, lost: PeerLost) -> tuple[TrainJob, Placement]:
        """The job and the ranks to go on with.

        Raises:
            PeerLost: none is left.
        """
        job, placement = self._lineup.job, self._lineup.placement
        workers = [rank for rank in lost.ranks if rank < placement.workers]
        if job.config.on_failure != SHRINK or not workers:
            return job, placement
        if len(workers) >= placement.workers:
            raise PeerLost(lost.ranks, f"{lost.why}; none is left to go on") from lost
        return self._lineup.of(placement.workers - len(workers))
