"""A process that evaluates snapshots of a model while its parent trains.

    rank      epoch 1 │copy│ epoch 2 │copy│ epoch 3 ...
    beside             └────── evaluates 1 ──────┴── evaluates 2 ...      on time that nobody else wants

It is a process because a thread would hold the interpreter's lock when training wants it, and a fork of the
rank because that has model and data already: neither is loaded or copied again. It runs under the scheduler's
idle policy, computes on one thread, and is gone when its parent is. On a busy machine it may get no time at
all: what is not done in time the rank does itself, so that nobody ever waits for it.
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
from tutti.training.evaluation import keras_statistics
from tutti.training.sums import Tally

SNAPSHOT_BYTES: Final = 256 << 20
"""Memory that the snapshots of one rank may take; there is always room for one."""

MOST_SNAPSHOTS: Final = 64
_ALIGNMENT: Final = 64
_PR_SET_PDEATHSIG: Final = 1
_NICEST: Final = 19

Sums = tuple[Tensor, Tensor]
"""The result of `Tally.sums`."""


class BackgroundEvaluator:
    """An evaluator of snapshots of a replica in a process of its own, as far as there is time.

    Args:
        replica: the model.
        evaluate: evaluates the replica's module as it is. The other process calls it too, with the weights
            and buffers of a snapshot in the module.
    """

    def __init__(self, replica: Replica, evaluate: Callable[[], Tally]) -> None:
        self._replica, self._evaluate = replica, evaluate
        # What forward passes change in training; counters are whole numbers.
        module = replica.module
        counters = [
            buffer for buffer in module.buffers() if not buffer.is_floating_point() and buffer.numel()
        ]
        self._buffers = [*replica.buffers, *counters, *keras_statistics(module)]
        self._slots = _make_slots(self._vectors())
        self._free = list(range(len(self._slots)))
        self._asked: deque[tuple[int, int]] = deque()
        self._found: dict[int, Sums] = {}
        self._taken = self._given = 0
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
        """Have the replica's present weights and buffers evaluated; done here where there is no room left."""
        number, self._taken = self._taken, self._taken + 1
        if not self._free:
            self.poll()
        if not self._free:
            self._found[number] = self._evaluate().sums()
            return
        slot = self._free.pop()
        for kept, vector in zip(self._slots[slot], self._vectors(), strict=True):
            kept.copy_(vector)
        self._asked.append((number, slot))
        self._connection.send(slot)

    def poll(self) -> int:
        """The number of results that can be taken, in the order of the snapshots."""
        while self._asked and self._connection.poll():
            self._receive()
        ready = 0
        while self._given + ready in self._found:
            ready += 1
        return ready

    def take(self) -> Sums:
        """The next result."""
        found = self._found.pop(self._given)
        self._given += 1
        return found

    def finish(self) -> None:
        """End the process, and evaluate here what it has not done."""
        self.poll()
        self.close()
        own = [tensor.clone() for tensor in self._buffers]
        try:
            for number, slot in self._asked:
                self._look_at(self._slots[slot])
                self._found[number] = self._evaluate().sums()
        finally:
            self._look_at([*(flat.weights for flat in self._replica.flats), *own])
        self._asked.clear()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._pid:
            self._connection.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _vectors(self) -> list[Tensor]:
        return [*(flat.weights for flat in self._replica.flats), *self._buffers]

    def _receive(self) -> None:
        try:
            found: tuple[list[int], list[float]] | str = self._connection.recv()
        except EOFError:
            found = "it was killed; where memory is short, use '--validate pause'"
        if isinstance(found, str):
            raise RuntimeError(f"the process that evaluates beside training failed: {found}")
        counts, sums = found
        number, slot = self._asked.popleft()
        self._found[number] = torch.tensor(counts), torch.tensor(sums, dtype=torch.float64)
        self._free.append(slot)

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
    def _look_at(self, vectors: list[Tensor]) -> None:
        """Put a snapshot into the module. Weights are only pointed to: others may see the replica's own."""
        weights, buffers = vectors[: len(self._replica.flats)], vectors[len(self._replica.flats) :]
        self._replica.look_at(weights)
        for buffer, kept in zip(self._buffers, buffers, strict=True):
            buffer.copy_(kept)


def _make_slots(vectors: list[Tensor]) -> list[list[Tensor]]:
    """Places for snapshots, in memory that a forked process shares; none is used up before it is written."""
    sizes = [-(-vector.nbytes // _ALIGNMENT) * _ALIGNMENT for vector in vectors]
    each = sum(sizes)
    count = max(1, min(MOST_SNAPSHOTS, SNAPSHOT_BYTES // each))
    memory = mmap.mmap(-1, count * each)
    slots = []
    for slot in range(count):
        starts = [slot * each + sum(sizes[:i]) for i in range(len(sizes))]
        slots.append(
            [
                torch.frombuffer(memory, dtype=vector.dtype, count=vector.numel(), offset=start).view(
                    vector.shape
                )
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
