"""Checkpoints of all ranks, written while they train.

    rank 0    │ copy │ train ...        The copy is all that a rank waits for: it lies in memory that the
    rank 1    │ copy │ train ...        process which writes the files of its host has too. Ranks of a host
    writer           └─ write ───┘      that does not see the folder send theirs to rank 0.

A checkpoint that is due while the one before it is still being written is left out, saying so: a slow disk
makes checkpoints rarer, not training slower.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from tutti.checkpoint.encoding import encode
from tutti.checkpoint.snapshot import MemorySnapshot, Sizes
from tutti.checkpoint.writer import Writer
from tutti.checkpoint.writer_process import Order, WriterAnswer
from tutti.comm.base import Communicator
from tutti.errors import BadRunFolder
from tutti.records.checkpoints import remove_unfinished
from tutti.records.json_lines import Json, to_json
from tutti.state import State
from tutti.terminal import warn_on_stderr


@dataclass(frozen=True)
class _WriterReport:
    """Message of a rank to the others before a checkpoint."""

    sizes: Sizes
    failure: str | None  # of the last one
    busy: bool  # with the last one


class Saver:
    """The writer of a run's checkpoints. All ranks make one, and call its methods together.

    A checkpoint that cannot be written is a warning, and the ones before it are kept: training goes on.

    Attributes:
        last: on rank 0 the step of the last checkpoint that is known to be whole on the disk.

    Args:
        comm: the ranks whose states belong together.
        folder: of the run's checkpoints, as this rank sees it; None: it sees none. Rank 0 has to see it.
        keep: how many of the last ones are kept; the one with the highest score is kept beside them.
        warn: gets the warnings, on rank 0.

    Raises:
        BadRunFolder: rank 0 cannot write to the folder.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path | None,
        keep: int = 3,
        warn: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self._comm, self._folder, self._keep, self._warn = comm, folder, keep, warn
        self._one_process = _in_one_process(comm)
        self._host = comm if self._one_process else comm.node
        self.last: int | None = None
        self._session, leaders, senders = self._find_writers()
        leader = leaders[comm.rank]
        self._hosts = sorted(set(leaders))
        self._written_here = [rank for rank, one in enumerate(leaders) if one == leader]
        self._snapshot = MemorySnapshot(comm, self._host, self._written_here, senders)
        self._attempts = 0
        self._has_warned = False
        self._failure: str | None = None
        self._writer = Writer() if comm.rank == leader else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.close()

    def save(
        self,
        step: int,
        state: State,
        facts: Json | None = None,
        score: float | None = None,
        wait: bool = False,
    ) -> bool:
        """Take a checkpoint (collective); the state is copied when this returns, and written later.

        Args:
            step: how many steps were done.
            state: of this rank.
            facts: of the run, JSON values; rank 0's count.
            score: how good the model is, the higher the better; rank 0's counts.
            wait: for the one before, and for this one.

        Returns:
            The same on all ranks; False: it was left out, as the one before is still being written.
        """
        # No virtual clock knows when a process is done, and equal simulations have equal results.
        if wait or self._one_process:
            self.wait()
        if self._writer is not None:
            self._note(self._writer.poll())
        rank = self._comm.rank
        encoded = encode(state, rank)
        texts = [encoded.head]
        if rank == 0:
            texts.append(to_json(facts or {}).encode(errors="surrogatepass"))
        busy = self._writer is not None and self._writer.is_busy
        report = _WriterReport((encoded.file_size, *map(len, texts)), self._failure, busy)
        self._failure = None
        reports = cast("list[_WriterReport]", self._comm.all_gather_objects(report))
        if not self._is_free(step, reports):
            return False
        sizes = {other: reports[other].sizes for other in self._written_here}
        self._snapshot.take(encoded, texts, sizes)
        self._attempts += 1
        if self._writer is not None:
            self._writer.give(self._order(step, sizes, score))
        if wait:
            self.wait()
        return True

    def finish(self) -> None:
        """Wait for the last checkpoint, and end (collective)."""
        self.wait()
        self.close()

    def end(self) -> None:
        """Wait for what this host writes of the last checkpoint, and end."""
        if self._writer is not None:
            self._note(self._writer.poll(None))
        self.close()

    def close(self) -> None:
        """End, whatever is being written."""
        if self._writer is not None:
            self._writer.close()
        self._snapshot.close()

    def _find_writers(self) -> tuple[str, list[int], list[int]]:
        """Return this session's name, each rank's writer, and who does not see the folder (collective)."""
        comm, session, problem = self._comm, secrets.token_hex(4), None
        if comm.rank == 0:
            problem = self._prepare(session)
        session, problem = cast("tuple[str, str | None]", comm.broadcast_object((session, problem)))
        if problem:
            raise BadRunFolder(problem)
        if comm.size == 1:
            return session, [0], []
        # A folder of the same name may be another one on another host.
        sees = self._folder is not None and _seen(self._folder, session).exists()
        sees, leader = cast("tuple[bool, int]", self._host.broadcast_object((sees, comm.rank if sees else 0)))
        found = cast("list[tuple[bool, int]]", comm.all_gather_objects((sees, leader)))
        if comm.rank == 0 and self._folder is not None:
            _seen(self._folder, session).unlink(missing_ok=True)
        return (
            session,
            [leader for _, leader in found],
            [rank for rank, (sees, _) in enumerate(found) if not sees],
        )

    def _prepare(self, session: str) -> str | None:
        """Make the folder; returns why it cannot be used."""
        if self._folder is None:
            return "rank 0 sees no folder for checkpoints; name one that it can write to with --out"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
            if self._comm.size > 1:
                _seen(self._folder, session).write_bytes(b"")
        except OSError as error:
            return (
                f"cannot write {self._folder}: {error.strerror}; name a folder that you may write with --out"
            )
        return None

    def _order(self, step: int, sizes: Mapping[int, Sizes], score: float | None) -> Order:
        assert self._folder is not None, "a rank that writes sees the folder"
        return Order(
            memory=f"/proc/{os.getpid()}/fd/{self._snapshot.memory}",
            folder=self._folder,
            attempt=f"{self._session}-{self._attempts}",
            files=self._snapshot.places(sizes),
            host=self._hosts.index(self._comm.rank),
            hosts=len(self._hosts),
            step=step,
            ranks=self._comm.size,
            score=score,
            keep=self._keep,
        )

    def _is_free(self, step: int, reports: Sequence[_WriterReport]) -> bool:
        """Return whether the checkpoint of a step can be written now."""
        failed = self._hear(report.failure for report in reports)
        # Rank 0 has waited for the host that has failed, and does not any more.
        busy = any(report.busy for report in reports[failed:])
        if busy and self._comm.rank == 0 and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"the checkpoint of step {step:,} was left out: the one before it is still being written, as "
                "the disk is slow or no core has time; save less often, or leave a core free (this warning "
                "comes once)"
            )
        return not busy

    def _hear(self, failures: Iterable[str | None]) -> bool:
        """Return whether another host could not write; if so, rank 0 gives the whole checkpoint up."""
        failure = next(filter(None, failures), None)
        if failure is not None and self._comm.rank == 0:
            assert self._writer is not None, "rank 0 has files written"
            self._writer.close()
            self._warn(failure)
        return failure is not None

    def _note(self, answer: WriterAnswer | None) -> None:
        """Note the outcome of a checkpoint, if there is one."""
        if answer is None:
            return
        if answer.error is None:
            self.last = answer.step
            if answer.left is not None:
                self._warn(
                    f"the checkpoint of step {answer.step} is written, but what it replaces is still there: "
                    f"{answer.left}"
                )
            return
        failure = (
            f"the checkpoint of step {answer.step} was not written: {answer.error}; the ones before it are "
            "kept, and training goes on"
        )
        if self._comm.rank == 0:
            self._warn(failure)
        else:
            self._failure = failure

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or cannot be (collective)."""
        if self._writer is not None and self._comm.rank > 0:
            self._note(self._writer.poll(None))
        failures = cast("list[str | None]", self._comm.all_gather_objects(self._failure))
        self._failure = None
        if not self._hear(failures) and self._writer is not None and self._comm.rank == 0:
            self._note(self._writer.poll(None))
        self._comm.barrier()


def _seen(folder: Path, session: str) -> Path:
    """The path of a file by which ranks see that the folder is rank 0's; it goes with what is unfinished."""
    return folder / f".seen-{session}.unfinished"


def _in_one_process(comm: Communicator) -> bool:
    """Tell whether all ranks are threads of one process (collective)."""
    return comm.size > 1 and len(set(comm.all_gather_objects(_process_token(os.getpid())))) == 1


@cache
def _process_token(process: int) -> str:
    """Return a text that no other process has; it is as long in all."""
    return secrets.token_hex(8)
