"""A process that evaluates snapshots of a model while its parent trains.

    rank          epoch 1 │copy│ epoch 2 │copy│ epoch 3 ...
    background    starts       └── evaluates 1 ──────┴── evaluates 2 ...  on idle time

It is a process because a thread would hold the interpreter's lock when training wants it, and a fresh one
because a fork has copies of locks that other threads of the rank hold, and not those threads. It gets the
model and what evaluates it pickled, and snapshots through memory that both map. It runs under the
scheduler's idle policy, computes on one thread, and is gone when its parent is. On a busy machine it may get
no time at all: what is not done in time the rank does itself, so nothing ever waits for it.

The process costs 2 s of processor time before its first result, all of it imports, and 300 MB of
memory; starting it holds the rank up for 10 ms.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import cloudpickle
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tutti.errors import BadOption, TuttiError
from tutti.load_object import import_files, imported_files
from tutti.replica import Replica, copy_all
from tutti.training.background_process import PROGRAM, Start
from tutti.training.evaluation import Sums, Tally
from tutti.training.snapshots import SnapshotLayout

SNAPSHOT_BYTES: Final = 256 << 20
"""Memory that the snapshots of one rank may take; there is always room for one."""

MOST_SNAPSHOTS: Final = 64


@dataclass(frozen=True)
class Work:
    """All that the other process must know."""

    module: nn.Module
    evaluate: Callable[[], Tally]
    floats: torch.dtype
    matmul: str

    def pickled(self) -> int:
        """A descriptor of a file without a name that has it pickled.

        Raises:
            BadOption: it cannot be pickled.
        """
        file = os.memfd_create("tutti-model", os.MFD_CLOEXEC)
        try:
            with open(os.dup(file), "wb") as stream:
                cloudpickle.dump(self, stream)
            os.lseek(file, 0, os.SEEK_SET)  # where the other process begins to read
        except Exception as error:
            os.close(file)
            raise BadOption(
                "--validate background sends the model to another process, which cannot be done "
                f"({type(error).__name__}: {error}); use --validate distributed"
            ) from error
        return file


class BackgroundEvaluator:
    """An evaluator of snapshots of a replica in a process of its own, as far as there is time.

    Args:
        replica: the model.
        evaluate: evaluates the replica's module as it is. A copy in the other process does so with the
            weights and buffers of a snapshot in a copy of the module.

    Raises:
        BadOption: the module, or `evaluate`, cannot be pickled.
    """

    def __init__(self, replica: Replica, evaluate: Callable[[], Tally]) -> None:
        self._evaluate, self._layout = evaluate, SnapshotLayout(replica)
        floats, matmul = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        work = Work(replica.module, evaluate, floats, matmul).pickled()
        memory = os.memfd_create("tutti-snapshots", os.MFD_CLOEXEC)
        count = max(1, min(MOST_SNAPSHOTS, SNAPSHOT_BYTES // self._layout.nbytes))
        os.ftruncate(memory, count * self._layout.nbytes)
        self._slots = self._layout.slots(mmap.mmap(memory, 0))
        self._free = list(range(count))
        self._asked: deque[tuple[int, int]] = deque()
        self._found: dict[int, Sums] = {}
        self._taken = self._given = 0
        self._connection, theirs = Pipe()
        start = Start(
            os.getpid(),
            [str(path) for path in sys.path],
            imported_files(),
            theirs.fileno(),
            work,
            memory,
        )
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, json.dumps(asdict(start))],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=(theirs.fileno(), work, memory),
        )
        theirs.close()
        os.close(work)
        os.close(memory)

    def snapshot(self) -> None:
        """Have the replica's present weights and buffers evaluated; done here where there is no room left."""
        number, self._taken = self._taken, self._taken + 1
        if not self._free:
            self.poll()
        if not self._free:
            self._found[number] = self._evaluate().sums()
            return
        slot = self._free.pop()
        copy_all(self._slots[slot], self._layout.present)
        self._asked.append((number, slot))
        with suppress(BrokenPipeError):  # it has failed: `poll` says why
            self._connection.send(slot)

    def poll(self) -> int:
        """The number of results that can be taken, in the order of the snapshots."""
        while self._asked and self._connection.poll():
            self._receive()
        ready = 0
        while self._given + ready in self._found:
            ready += 1
        return ready

    def waiting(self) -> dict[int, Sums | list[Tensor]]:
        """The snapshots that were not taken yet, by number: their results, or themselves if there is none."""
        self.poll()
        slots = {number: self._slots[slot] for number, slot in self._asked}
        return {n: self._found[n] if n in self._found else slots[n] for n in range(self._given, self._taken)}

    def take(self) -> Sums:
        """The next result."""
        found = self._found.pop(self._given)
        self._given += 1
        return found

    def finish(self) -> None:
        """End the process, and evaluate here what it has not done."""
        self.poll()
        self.close()
        for number, slot in self._asked:
            with self._layout.shown(self._slots[slot]):
                self._found[number] = self._evaluate().sums()
        self._asked.clear()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _receive(self) -> None:
        try:
            found: list[NDArray[Any]] | str = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise TuttiError(
                "the process that evaluates beside training was killed; if nobody did that, memory is short: "
                "use --validate pause"
            ) from None
        if isinstance(found, str):
            raise RuntimeError(f"the process that evaluates beside training failed: {found}")
        counts, sums, *rows = map(torch.from_numpy, found)
        number, slot = self._asked.popleft()
        self._found[number] = Sums(counts, sums, tuple(rows))
        self._free.append(slot)


def serve(start: Start) -> None:
    """Evaluate the parent's snapshots until it is done (entry point of the other process)."""
    connection = Connection(start.connection)
    try:
        import_files(start.files)
        with open(start.work, "rb") as stream:
            work: Work = cloudpickle.load(stream)
        torch.set_num_threads(1)
        torch.set_default_dtype(work.floats)
        torch.set_float32_matmul_precision(work.matmul)
        layout = SnapshotLayout(Replica(work.module))
        slots = layout.slots(mmap.mmap(start.memory, 0))
        while (asked := _next(connection)) is not None:
            layout.show(slots[asked])
            found = work.evaluate().sums()
            # As arrays: torch would send tensors as names of shared memory.
            connection.send([one.numpy() for one in (found.counts, found.sums, *found.rows)])
    except BaseException:
        connection.send(traceback.format_exc())
        raise SystemExit(1) from None


def _next(connection: Connection) -> int | None:
    """The slot of the next snapshot; None: there is none any more."""
    try:
        return cast("int", connection.recv())
    except EOFError:
        return None
