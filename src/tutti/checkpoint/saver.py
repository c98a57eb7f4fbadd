"""Checkpoints of all ranks, written while they train.

    rank 0    │ copy │ train ...        The copy is all that a rank waits for: it lies in memory that the
    rank 1    │ copy │ train ...        process which writes the files has too. Ranks of other hosts send
    writer           └─ write ───┘      theirs to rank 0.

A checkpoint that is due while the one before it is still being written is left out with a warning: a slow
disk makes checkpoints rarer, not training slower.

Checkpoints in memory outlive the ranks, and are taken often: new ranks continue from the last one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tutti.checkpoint.memory_files import MemoryPlace, StateCopy
from tutti.checkpoint.snapshot import MemorySnapshot
from tutti.checkpoint.writer_process import Order, Writer, WriterAnswer
from tutti.comm.base import Communicator
from tutti.errors import BadRunFolder
from tutti.records.checkpoints import remove_unfinished
from tutti.records.json_lines import Json
from tutti.state import State
from tutti.terminal import warn_on_stderr


class Saver:
    """The writer of a run's checkpoints. All ranks make one, and call its methods together.

    A checkpoint that cannot be written is a warning, and earlier ones are kept: training continues. On rank 0
    `last` is the step of the last checkpoint that is known to be whole on the disk.
    """

    def __init__(
        self,
        comm: Communicator,  # the ranks whose states belong together
        folder: Path,  # of the run's checkpoints; rank 0's counts
        keep: int = 3,  # how many of the last ones stay, and the one with the highest score
        warn: Callable[[str], None] = warn_on_stderr,  # gets the warnings, on rank 0
    ) -> None:
        self._comm, self._folder, self._keep, self._warn = comm, folder, keep, warn
        problem = comm.broadcast_object(_prepare(folder) if comm.rank == 0 else None)
        if problem is not None:
            raise BadRunFolder(str(problem))
        self._one_process = _in_one_process(comm)
        self._snapshot = MemorySnapshot(comm, comm if self._one_process else comm.node)
        self._session, self._attempts = secrets.token_hex(4), 0
        self._has_warned = False
        self.last: int | None = None
        self._writer = Writer() if comm.rank == 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        self.close()

    def save(
        self,
        step: int,  # how many were made
        state: State,  # of this rank
        facts: Json | None = None,  # of the run; rank 0's count
        score: float | None = None,  # how good the model is, the higher the better; rank 0's counts
        wait: bool = False,  # for the one before, and for this one
    ) -> bool:
        """Copy the state (collective), to be written later; return False if the writer is still busy."""
        # No virtual clock knows when a process is done, and equal simulations have equal results.
        if wait or self._one_process:
            self.wait()
        self._poll(0.0)
        if self._comm.broadcast_object(self._writer is not None and self._writer.is_busy):
            self._warn_of_slow_disk(step)
            return False
        files = self._snapshot.take(state, facts or {})
        self._attempts += 1
        if self._writer is not None:
            order = Order(
                memory=f"/proc/{os.getpid()}/fd/{self._snapshot.memory}",
                folder=self._folder,
                attempt=f"{self._session}-{self._attempts}",
                files=files,
                step=step,
                ranks=self._comm.size,
                score=score,
                keep=self._keep,
            )
            self._writer.give(order)
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or cannot be (collective)."""
        self._poll(None)
        self._comm.barrier()

    def end(self) -> None:
        """Wait for the last checkpoint where it is written, and end."""
        self._poll(None)
        self.close()

    def close(self) -> None:
        """End at once."""
        if self._writer is not None:
            self._writer.close()
        self._snapshot.close()

    def _poll(self, timeout_s: float | None) -> None:
        """Note the outcome of the last checkpoint, if there is one."""
        answer: WriterAnswer | None = None if self._writer is None else self._writer.poll(timeout_s)
        if answer is None:
            return
        if answer.whole:
            self.last = answer.step
        if answer.error is not None:
            what = "is written, but what it replaces is still there" if answer.whole else "was not written"
            self._warn(f"the checkpoint of step {answer.step} {what}: {answer.error}; training continues")

    def _warn_of_slow_disk(self, step: int) -> None:
        if self._comm.rank == 0 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"the checkpoint of step {step:,} was left out: the one before it is still being written, as "
                "the disk is slow or no core has time; save less often, or leave a core free (this warning "
                "comes once)"
            )


class MemorySaver:
    """The writer of checkpoints in memory. All ranks make one, and call its methods together."""

    def __init__(self, comm: Communicator, place: MemoryPlace) -> None:
        self._comm, self._place = comm, place
        self._copies = [MemorySnapshot(comm, comm.node, copy) for copy in place.copies]
        whole = place.last.number if comm.rank == 0 else 0
        self._number = 2 if comm.broadcast_object(whole) == 1 else 1

    def save(self, step: int, state: State, facts: Json) -> None:
        """Copy the state of all ranks (collective), as `Saver.save` does."""
        files = self._copies[self._number - 1].take(state, facts)
        if self._comm.rank == 0:
            self._place.publish(StateCopy(self._number, step, self._comm.size, files))
        self._number = 3 - self._number

    def close(self) -> None:
        """Unmap the memory, which stays."""
        for copy in self._copies:
            copy.close()


def _prepare(folder: Path) -> str | None:
    """Make the folder; return why it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
    except OSError as error:
        return f"cannot write {folder}: {error.strerror}; name a folder that you may write with --out"
    return None


def _in_one_process(comm: Communicator) -> bool:
    """Return whether all ranks are threads of one process (collective)."""
    return comm.size > 1 and len(set(comm.all_gather_objects(_process_token(os.getpid())))) == 1


@cache
def _process_token(process: int) -> str:
    """Return a text that no other process has; it is as long in all."""
    return secrets.token_hex(8)
