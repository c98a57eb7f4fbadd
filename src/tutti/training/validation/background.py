"""`--validate background`: evaluation in processes besides the ranks.

    rank       epoch 1 │copy│ epoch 2 │copy│ epoch 3 ...
    process    starts       └── evaluates 1 ──────┴── evaluates 2 ...  at the lowest priority

A thread would compete with training for the interpreter's lock, and a fork would inherit locks without their
threads: so it is a fresh process, with 2 s of imports and 300 MB of memory. When unfinished snapshots are
needed the rank evaluates them itself, so it never waits for the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, BinaryIO, Final, cast

import cloudpickle
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from tutti.comm.base import Communicator, cut
from tutti.data.parts import Part
from tutti.errors import BadOption, TuttiError
from tutti.load_object import import_files, imported_files
from tutti.records.run import Evaluation
from tutti.replica import Replica
from tutti.state import State, Values
from tutti.training.evaluation import Objective, Sums, Tally, evaluate, load_buffers, named_buffers
from tutti.training.validation import Validation

PROGRAM: Final = (
    "import json, os, signal, sys; os.nice(19); "
    "start = json.loads(sys.argv[1]); sys.path[:] = start.pop('path'); "
    "[signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]; "
    "from tutti.training.validation.background import serve; serve(**start)"
)
"""The program of the process, which ignores the signals that stop a job."""

SNAPSHOT_BYTES: Final = 256 << 20
"""The most memory of a rank's waiting snapshots; there is always room for one."""

_PR_SET_PDEATHSIG: Final = 1


class Background(Validation):
    """A process besides each rank evaluates its share of a copy of the weights, in idle time.

    At the end, or at a checkpoint, the ranks evaluate the rest.
    """

    def __init__(self, replica: Replica, part: Part, comm: Communicator, objective: Objective) -> None:
        super().__init__(replica, part, comm, objective)
        mine = cut(len(part), comm.size)[comm.rank]
        alone = cast("Communicator", SimpleNamespace(rank=0, size=1, note_progress=lambda: None))
        # The process gets a copy of this, and of the module.
        self._evaluate = partial(evaluate, replica.module, part.stretch(mine), alone, objective)
        self._waiting: deque[BinaryIO] = deque()
        self._results: deque[Sums] = deque()
        self._process, self._connection = self._started()

    @override
    def begin(self) -> None:
        if sum(file.tell() for file in self._waiting) > SNAPSHOT_BYTES:
            self._finish()
        if self._process is None:
            self._process, self._connection = self._started()
        file = os.fdopen(os.memfd_create("tutti-snapshot", os.MFD_CLOEXEC), "w+b")
        torch.save(self._snapshot(), file)
        file.flush()
        self._waiting.append(file)
        with suppress(BrokenPipeError):  # it has failed: `_poll` says why
            self._connection.send(file.fileno())

    @override
    def close(self) -> None:
        """End the process, and drop the snapshots."""
        self._end()
        while self._waiting:
            self._waiting.popleft().close()

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        self._add_up(everything)
        return super().collect(everything)

    @override
    def state(self) -> State:
        self._add_up(everything=True)
        return super().state()

    def _add_up(self, everything: bool) -> None:
        """Add up the results that the ranks have, or all, into `_found` (collective)."""
        self._poll()
        if everything:
            self._finish()
        comm, tally = self._comm, Tally(self._objective)
        ready = min(cast("list[int]", comm.all_gather_objects(len(self._results))))
        self._found += [tally.total_of(self._results.popleft(), comm) for _ in range(ready)]

    def _poll(self) -> None:
        """Receive the results so far."""
        while self._process is not None and self._waiting and self._connection.poll():
            self._receive()

    def _finish(self) -> None:
        """End the process, and evaluate the waiting snapshots here."""
        self._poll()
        self._end()
        if not self._waiting:
            return
        replica = self._replica
        weights, buffers = [flat.weights for flat in replica.flats], self._snapshot()["buffers"]
        while self._waiting:
            with self._waiting.popleft() as file:
                file.seek(0)
                _show(replica, torch.load(file))
            self._results.append(self._evaluate().sums())
        _show(replica, {"weights": weights, "buffers": buffers})

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _snapshot(self) -> Values:
        replica = self._replica
        buffers = {name: one.clone() for name, one in named_buffers(replica.module).items()}
        return {"weights": [flat.weights.clone() for flat in replica.flats], "buffers": buffers}

    def _started(self) -> tuple[subprocess.Popen[bytes] | None, Connection]:
        work = os.memfd_create("tutti-model", os.MFD_CLOEXEC)
        try:
            with open(os.dup(work), "wb") as stream:
                arithmetic = torch.get_default_dtype(), torch.get_float32_matmul_precision()
                cloudpickle.dump((self._replica.module, self._evaluate, *arithmetic), stream)
        except Exception as error:
            os.close(work)
            raise BadOption(
                "--validate background sends the model to another process, which cannot be done "
                f"({type(error).__name__}: {error}); use --validate pause"
            ) from error
        os.lseek(work, 0, os.SEEK_SET)  # where the other process begins to read
        ours, theirs = Pipe()
        start = {"path": [str(path) for path in sys.path], "files": imported_files(), "parent": os.getpid()}
        start |= {"connection": theirs.fileno(), "work": work}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, json.dumps(start)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=(theirs.fileno(), work),
        )
        theirs.close()
        os.close(work)
        return process, ours

    def _receive(self) -> None:
        try:
            found: list[NDArray[Any]] | str = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise TuttiError(
                "the process that evaluates beside training was killed, perhaps as memory is short: "
                "use --validate pause"
            ) from None
        if isinstance(found, str):
            raise RuntimeError(f"the process that evaluates beside training failed: {found}")
        counts, sums, *rows = map(torch.from_numpy, found)
        self._results.append(Sums(counts, sums, tuple(rows)))
        self._waiting.popleft().close()


def serve(parent: int, files: list[str], connection: int, work: int) -> None:
    """Evaluate the snapshots of the rank `parent` (entry point of the process).

    `files` are Python files that the rank has imported by path; `connection` and `work` are file descriptors:
    of the connection to the rank, and of the pickled module, evaluation and settings of torch.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    snapshots = Connection(connection)
    try:
        import_files(files)
        with open(work, "rb") as stream:
            module, evaluate, floats, matmul = cloudpickle.load(stream)
        torch.set_num_threads(1)
        torch.set_default_dtype(floats)
        torch.set_float32_matmul_precision(matmul)
        replica = Replica(cast("nn.Module", module))
        with suppress(EOFError):
            while True:
                _show(replica, torch.load(f"/proc/{parent}/fd/{snapshots.recv()}"))
                found = evaluate().sums()
                # torch would send tensors as names of shared memory.
                snapshots.send([one.numpy() for one in (found.counts, found.sums, *found.rows)])
    except BaseException:
        snapshots.send(traceback.format_exc())
        raise SystemExit(1) from None


def _show(replica: Replica, snapshot: Values) -> None:
    """Point the module to a snapshot; its weights are not copied, as ranks may share the replica's."""
    replica.point_to(snapshot["weights"])
    load_buffers(replica.module, snapshot["buffers"])
