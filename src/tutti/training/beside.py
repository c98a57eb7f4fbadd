"""A process that evaluates snapshots of a model while its parent trains.

    rank      epoch 1 │copy│ epoch 2 │copy│ epoch 3 ...
    beside             └────── evaluates 1 ──────┴── evaluates 2 ...      on time that nobody else wants

It is a process because a thread would hold the interpreter's lock when training wants it, and a fork of the
rank because that has model and data already: neither is loaded or copied again. It runs under the scheduler's
idle policy, computes on one thread, and is gone when its parent is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

import torch
from torch import Tensor

from tutti.replica import Replica
from tutti.training.tally import Tally

SNAPSHOT_BYTES: Final = 256 << 20
"""How much memory the snapshots of one rank may take; there is always room for two."""

MOST_SNAPSHOTS: Final = 64
_ALIGNMENT: Final = 64
_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19

Sums = tuple[Tensor, Tensor]
"""What `Tally.sums` gives."""


class Beside:
    """Evaluates snapshots of a replica in a process of its own.

    Args:
        replica: the model.
        evaluate: evaluates the replica's module as it is. It is called in the other process alone, with the
            weights and buffers of a snapshot in the module.

    Attributes:
        done: results that nobody has taken yet, in the order of the snapshots.
    """

    def __init__(self, replica: Replica, evaluate: Callable[[], Tally]) -> None:
        self.done: deque[Sums] = deque()
        self._replica, self._evaluate = replica, evaluate
        self._slots = _make_slots(self._vectors())
        self._taken = self._received = 0
        self._connection, theirs = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Newer versions of Python warn of forking beside threads; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self._work(theirs, parent)
        theirs.close()

    def snapshot(self) -> None:
        """Have the replica's present weights and buffers evaluated; waits when there is no room for them."""
        if self._taken - self._received == len(self._slots):
            self._receive()
        slot = self._taken % len(self._slots)
        for kept, vector in zip(self._slots[slot], self._vectors(), strict=True):
            kept.copy_(vector)
        self._taken += 1
        self._connection.send(slot)

    def poll(self) -> None:
        """Put the results that are ready into `done`."""
        while self._received < self._taken and self._connection.poll():
            self._receive()

    def wait(self) -> None:
        """Put all results into `done`."""
        while self._received < self._taken:
            self._receive()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _vectors(self) -> list[Tensor]:
        return [*(flat.weights for flat in self._replica.flats), *self._replica.buffers]

    def _receive(self) -> None:
        try:
            found: tuple[list[int], list[float]] | str = self._connection.recv()
        except EOFError:
            found = "it was killed; where memory is short, use '--validate pause'"
        if isinstance(found, str):
            raise RuntimeError(f"the process that evaluates beside training failed: {found}")
        counts, sums = found
        self.done.append((torch.tensor(counts), torch.tensor(sums, dtype=torch.float64)))
        self._received += 1

    def _work(self, connection: Connection, parent: int) -> None:
        """Serve the parent; never returns."""
        try:
            _settle_in(parent)
            while True:
                self._look_at(self._slots[connection.recv()])
                counts, sums = self._evaluate().sums()
                # As lists: torch would send tensors as names of shared memory.
                connection.send((counts.tolist(), sums.tolist()))
        except EOFError:
            os._exit(0)
        except BaseException:
            connection.send(traceback.format_exc())
        finally:
            os._exit(1)

    @torch.no_grad()
    def _look_at(self, slot: list[Tensor]) -> None:
        """Point the module's parameters into a snapshot; the parent's weights may be shared: leave them."""
        weights, buffers = slot[: len(self._replica.flats)], slot[len(self._replica.flats) :]
        self._replica.look_at(weights)
        for buffer, kept in zip(self._replica.buffers, buffers, strict=True):
            buffer.copy_(kept)


def _make_slots(vectors: list[Tensor]) -> list[list[Tensor]]:
    """Places for snapshots, in memory that a forked process shares; none is used up before it is written."""
    sizes = [-(-vector.nbytes // _ALIGNMENT) * _ALIGNMENT for vector in vectors]
    each = sum(sizes)
    count = max(2, min(MOST_SNAPSHOTS, SNAPSHOT_BYTES // each))
    memory = mmap.mmap(-1, count * each)
    slots = []
    for slot in range(count):
        starts = [slot * each + sum(sizes[:i]) for i in range(len(sizes))]
        slots.append(
            [
                torch.frombuffer(memory, dtype=vector.dtype, count=len(vector), offset=start)
                for vector, start in zip(vectors, starts, strict=True)
            ]
        )
    return slots


def _settle_in(parent: int) -> None:
    """Be quiet, be last, and be gone when the parent is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(_NICEST)
    # More would need the threads that the parent had and a forked process lacks.
    torch.set_num_threads(1)
