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
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.errors import BadCheckpoint, BadRunFolder, PeerLost, TuttiError, UserError
from tutti.launch.crew import Orders
from tutti.launch.placement import Placement
from tutti.launch.rank_processes import out_of_memory_kills
from tutti.launch.start import start
from tutti.records import checkpoints
from tutti.records.resize_request import ResizeRequest, answer, remove_forgotten, requested
from tutti.records.run_folder import RunFolder
from tutti.run.config import SHRINK
from tutti.run.losses import Losses
from tutti.run.resizing import resized, resized_text
from tutti.run.train_job import TrainJob, again
from tutti.terminal import warn_on_stderr

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that is full, or of which a user has had his share."""

PREPARE_S: Final = 600.0
"""The longest time without that ranks are prepared which were asked for: one may be stopped, and all wait."""


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
        with closing(_Plan(job, placement, memory)) as plan:
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
    """Have the last copy of the state become a checkpoint of the run, if the run fails in this block.

    An exception in the first epoch leaves nothing, as without copies: it would come again.
    """
    try:
        yield
    except TuttiError as error:
        try:
            folder, lost = place.folder, isinstance(error, PeerLost) or place.taken_over
            if folder is not None and (lost or RunFolder(folder).begun):
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


@dataclass(frozen=True)
class _Resize:
    """Other ranks that somebody has asked for, and that prepare themselves.

    Attributes:
        folder: of the run, where it was asked.
        request: the one for them.
        job: theirs.
        orders: likewise.
        kills_before: the `out_of_memory_kills` before they were started.
        ready: the time when all of them were prepared last; at first, when they were started.
        copies: that had been taken when they were prepared; None: they are not.
    """

    folder: Path
    request: ResizeRequest
    job: TrainJob
    orders: Orders
    kills_before: int
    ready: float
    copies: int | None = None


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
        self._resize: _Resize | None = None
        self._answered, self._lost_during = "", ""

    def reserve(self) -> Orders | None:
        """The work of ranks that are ready when one is lost; None: the run has not begun, or wants none."""
        if not self._job.config.standby or not self._memory.place.whole:
            return None
        try:
            job, placement = self._changed(PeerLost([0], ""))
        except PeerLost:
            return None  # The last one has none to go on with.
        return self._orders_in_reserve(job, placement)

    def asked_for(self) -> Orders | None:
        """The work of other ranks that are to take over once they are prepared; None: nobody wants that."""
        with suppress(BadRunFolder, OSError):  # Too many files may be open.
            folder = self._memory.place.folder
            request = None if folder is None else requested(folder)
            if folder is None or request is None or request.token == self._answered:
                self._forget_resize()
            elif self._memory.place.whole and (self._resize is None or self._resize.request != request):
                self._forget_resize()
                self._resize = self._prepared_for(folder, request)
            elif self._resize is not None and time.monotonic() - self._resize.ready > PREPARE_S:
                self.refuse(TuttiError(f"they were not ready within {PREPARE_S / 60:g} minutes"))
        return None if self._resize is None else self._resize.orders

    def may_take_over(self) -> bool:
        """Tell whether a copy of the state was taken since they were prepared: no step is to be lost.

        That takes as long as the longest time between two steps, in which the run may validate.
        """
        resize, taken = self._resize, self._memory.place.copies_taken
        assert resize is not None, "they were asked for"
        if resize.copies is None:
            self._memory.want_copy(True)
        before = taken if resize.copies is None else resize.copies
        self._resize = replace(resize, ready=time.monotonic(), copies=before)
        return taken > before

    def refuse(self, why: TuttiError) -> None:
        """Say that those who were asked for cannot take over."""
        if self._resize is not None:
            resize, here = self._resize, self._placement.workers
            text = f"the new ranks cannot take over, and the run goes on with {_ranks(here)} as before: {why}"
            self._forget_resize()
            self._refuse(resize.folder, resize.request, text)

    def note_stop(self) -> None:
        """Refuse what anybody asks for, as the run is to stop."""
        self._refuse_all("the run has been asked to stop; it goes on with others by", "-n {workers}")

    def close(self) -> None:
        """Refuse what anybody asks for, as the run is over, and leave no request in its folder."""
        with suppress(BadRunFolder):
            folder = self._memory.place.folder
            if folder is not None and RunFolder(folder).finished:
                self._refuse_all("the run has finished meanwhile; to train longer", "--epochs ...")
            else:
                self._refuse_all("the run has ended meanwhile; it goes on with others by", "-n {workers}")
            if folder is not None:
                remove_forgotten(folder)

    def _refuse_all(self, why: str, options: str) -> None:
        self._forget_resize()
        with suppress(BadRunFolder):
            folder = self._memory.place.folder
            request = None if folder is None else requested(folder)
            if folder is not None and request is not None and request.token != self._answered:
                of = options.format(workers=request.workers)
                way = f"tutti train --resume {shlex.quote(str(folder))} {of}"
                self._refuse(folder, request, f"{why}: {way}")

    def take_over(self) -> Orders:
        """Have those take over who were asked for; returns their work."""
        resize, before = self._resize, self._placement.workers
        assert resize is not None, "they were asked for"
        self._job, self._placement = again(replace(resize.job, takes_over=True)), resize.orders.placement
        self._memory.note_takeover()
        now = _ranks(self._placement.workers)
        text = f"going on with {now} instead of {before}{resized_text(self._job, self._first)}"
        print(f"tutti: {text}, as tutti resize asked", file=sys.stderr, flush=True)
        warnings = self._placement.warnings
        self._answer(resize.folder, resize.request, text, agreed=True, warnings=warnings)
        return resize.orders

    def after(self, lost: PeerLost) -> Orders:
        """The work of those that go on.

        Raises:
            PeerLost: too many were lost, or all, or their folder.
        """
        self._losses.note(lost)
        self._refuse_after_loss()
        before = self._placement.workers
        job, self._placement = self._changed(lost)
        try:
            self._job = again(replace(job, takes_over=True))
        except BadRunFolder as error:
            raise PeerLost(lost.ranks, f"{lost.why}; {error}") from error
        self._memory.note_takeover()
        of_fewer = resized_text(job, self._first) if self._placement.workers < before else ""
        going_on = f"going on with {_new_ranks(self._placement)}{of_fewer}"
        print(f"tutti: {lost}; {going_on}", file=sys.stderr, flush=True)
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
        self._forget_resize()

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
        return self._of(placement.workers - len(workers))

    def _of(self, workers: int) -> tuple[TrainJob, Placement]:
        """The job of so many workers, and where they run.

        Raises:
            BadOption: there cannot be so many.
        """
        job = resized(self._job, self._first, self._workers, workers)
        return job, job.placement()

    def _forget_resize(self) -> None:
        if self._resize is not None:
            self._resize = None
            self._memory.want_copy(False)

    def _prepared_for(self, folder: Path, request: ResizeRequest) -> _Resize | None:
        """Prepare for so many workers; None: there cannot be, and that is answered."""
        if request.workers == self._placement.workers:
            self._answer(folder, request, f"it has {_ranks(request.workers)} already", agreed=True)
            return None
        try:
            job, placement = self._of(request.workers)
        except UserError as error:
            self._refuse(folder, request, str(error))
            return None
        for text in placement.warnings:
            warn_on_stderr(text)
        orders = self._orders_in_reserve(job, placement)
        return _Resize(folder, request, job, orders, out_of_memory_kills(), time.monotonic())

    def _refuse_after_loss(self) -> None:
        """Prepare others no more who may be why ranks were lost, as these would be lost again."""
        if self._resize is None:
            return
        if out_of_memory_kills() > self._resize.kills_before:
            self.refuse(TuttiError("the memory ran out while they prepared themselves; ask for fewer"))
        elif self._resize.request.token == self._lost_during:
            self.refuse(TuttiError("twice ranks were lost while they prepared themselves"))
        else:
            self._lost_during = self._resize.request.token

    def _refuse(self, folder: Path, request: ResizeRequest, text: str) -> None:
        warn_on_stderr(f"tutti resize asked for {_ranks(request.workers)}, in vain: {text}")
        self._answer(folder, request, text, agreed=False)

    def _answer(
        self,
        folder: Path,
        request: ResizeRequest,
        text: str,
        *,
        agreed: bool,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Answer a request, once: where that fails nobody waits any more, and it would fail again."""
        self._answered = request.token
        try:
            answer(folder, request, text, agreed=agreed, warnings=warnings)
        except OSError as error:
            warn_on_stderr(
                f"whoever has asked for {_ranks(request.workers)} cannot be answered: {error.strerror}"
            )

    def _orders_in_reserve(self, job: TrainJob, placement: Placement) -> Orders:
        job = replace(job, gate=self._memory.shut_gate(), rehearses=True)
        return Orders(pickle.dumps(job), placement, waits=True)


def _ranks(count: int, kind: str = "rank") -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"


def _new_ranks(placement: Placement) -> str:
    return _ranks(placement.ranks, "new rank")
