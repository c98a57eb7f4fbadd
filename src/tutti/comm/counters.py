"""Counters: of the ranks of one host, in their shared memory, and of the ranks of several hosts.

The latter is in the shared memory of rank 0's host. That host's ranks add to it directly; all others ask rank
0, where a thread answers them at any time.

    rank of another host  ── [number, amount] ──>  a thread of rank 0  ── adds ──> the word in the arena
                          <── [value before] ────
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy
from typing_extensions import override

from tutti.comm.base import Counter
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.liveness import LONGEST_NAP_S, NAP_SHARE, SHORTEST_NAP_S

REQUEST: Final = 2
REPLY: Final = 3
"""The tags of messages with a counter's server; those of collectives (`mpi.transport`) are others."""


class HostCounter(Counter):
    """An integer in the arena; several threads may add to it."""

    def __init__(self, arena: Arena, offset: int) -> None:
        self._word, self._lock = arena.words(offset, 1), arena.lock(offset)
        self._threads = threading.Lock()  # The kernel's locks exclude only other processes.

    @override
    def add(self, amount: int = 1) -> int:
        with self._threads, self._lock:
            before: int = self._word[0]
            self._word[0] = before + amount
        return before


class RemoteCounter(Counter):
    """A counter on another host."""

    def __init__(self, ask: Callable[[int, int], int], number: int) -> None:
        self._ask, self._number = ask, number

    @override
    def add(self, amount: int = 1) -> int:
        return self._ask(self._number, amount)


class CounterServer:
    """The thread of rank 0 that adds to its counters for the ranks of other hosts."""

    def __init__(self, mpi: Any, comm: Any, serves: bool) -> None:
        self.counters: dict[int, Counter] = {}
        self.comm = comm
        self._mpi = mpi
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tutti counter server", daemon=True)
        if serves:
            self._thread.start()
            # MPI is finalised at exit too, and must find no thread inside.
            atexit.register(self.close)

    def close(self) -> None:
        """Stop answering."""
        if not self._closing.is_set():
            self._closing.set()
            if self._thread.is_alive():
                self._thread.join()
            atexit.unregister(self.close)

    def _serve(self) -> None:
        request, reply, found = numpy.zeros(2, numpy.int64), numpy.zeros(1, numpy.int64), self._mpi.Status()
        last = time.monotonic()
        try:
            while not self._closing.is_set():
                if self.comm.Iprobe(self._mpi.ANY_SOURCE, REQUEST, found):
                    sender = found.Get_source()
                    self.comm.Recv(request, sender, REQUEST)
                    reply[0] = self.counters[int(request[0])].add(int(request[1]))
                    self.comm.Send(reply, sender, REPLY)
                    last = time.monotonic()
                else:
                    nap_s = NAP_SHARE * (time.monotonic() - last)
                    time.sleep(min(max(nap_s, SHORTEST_NAP_S), LONGEST_NAP_S))
        except self._mpi.Exception:
            # A rank died, or the communicator was revoked: the next operation of the rank itself says so.
            return
