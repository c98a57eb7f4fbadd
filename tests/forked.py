"""Calls functions in ranks that are processes, forked from a server that has torch imported.

So a world of ranks starts in a fraction of a second; ranks that a launcher starts import torch for seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import set_forkserver_preload
from types import TracebackType
from typing import Any, Self

import cloudpickle

from tests.preloaded.server import PRELOADED

PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
# Forked itself, as a rule, it finds all of it there.
set_forkserver_preload([*PRELOADED])


class ForkedRanks:
    """Processes that call functions, for `with`; whatever is left of them is killed at the end.

    Args:
        join: called with its rank in each process before every function; what it returns is the function's
            first argument.
        ranks: one process each.

    Attributes:
        processes: by rank.
    """

    def __init__(self, join: Callable[[int], object], ranks: Iterable[int]) -> None:
        self._connections: dict[int, Connection] = {}
        self.processes = {}
        for rank in ranks:
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, cloudpickle.dumps(join))
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections[rank], self.processes[rank] = ours, process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what is left."""
        for rank, process in self.processes.items():
            process.kill()
            process.join()
            process.close()
            self._connections[rank].close()

    def start(self, function: Callable, *arguments: object, ranks: Iterable[int] | None = None) -> None:
        """Call `function(joined, *arguments)` in all ranks, or in some."""
        message = cloudpickle.dumps((function, arguments))
        for rank in self._connections if ranks is None else ranks:
            self._connections[rank].send_bytes(message)

    def outcome(self, rank: int, timeout_s: float = 60.0) -> object:
        """What the call returned in `rank`, or raised there.

        Raises:
            TimeoutError: the call has not ended in time.
            EOFError: the process is gone.
        """
        if not self._connections[rank].poll(timeout_s):
            raise TimeoutError(f"rank {rank} has not answered within {timeout_s} s")
        outcome, trace = cloudpickle.loads(self._connections[rank].recv_bytes())
        if isinstance(outcome, BaseException):
            outcome.add_note(f"rank {rank}:\n{trace}")
        return outcome

    def run(self, function: Callable, *arguments: object) -> list[Any]:
        """Call `function(joined, *arguments)` in all ranks; what they return, or raises what one raises.

        There is no time limit but the test's own.
        """
        self.start(function, *arguments)
        ranks = {connection: rank for rank, connection in self._connections.items()}
        outcomes = {}
        while ranks:
            for connection in wait(ranks):
                rank = ranks.pop(connection)
                outcomes[rank] = self.outcome(rank)
                if isinstance(outcomes[rank], BaseException):
                    raise outcomes[rank]
        return [outcomes[rank] for rank in sorted(outcomes)]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a rank."""
        os.kill(self.processes[rank].pid, number)


def _serve(connection: Connection, rank: int, join: bytes) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prepare: Callable[[int], object] | None = None
    while True:
        try:
            function, arguments = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome, trace = None, ""
        try:
            prepare = prepare or cloudpickle.loads(join)
            outcome = function(prepare(rank), *arguments)
        except Exception as error:
            outcome, trace = error, traceback.format_exc()
        with suppress(BrokenPipeError):
            connection.send_bytes(cloudpickle.dumps((outcome, trace)))
