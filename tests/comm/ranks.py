"""Starts the ranks of a host communicator as processes, and calls functions in them.

The processes are forked from a server that has torch imported: a world starts in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import set_forkserver_preload
from types import TracebackType

import cloudpickle

from tutti.comm.anonymous import Address
from tutti.comm.arena import Arena
from tutti.comm.control import Layout, control_bytes

PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
# torch imports its compiler when the first optimizer is made, which takes seconds in every process.
set_forkserver_preload(
    ["pytest", "torch._dynamo", "tutti.comm.host", "tutti.strategies", "tutti.training.loop"]
)


class World:
    """A world of rank processes, for `with`; whatever is left of it is killed at the end.

    Args:
        size: how many ranks.
        cores: how many cores the ranks are told they have.
        names: what the ranks are called in errors.
        absent: ranks that never come.
        join_timeout_s: how long the ranks wait for each other to come.

    Attributes:
        arena: the memory of the ranks.
        words: the control words of their communicator.
        processes: by rank.
    """

    def __init__(
        self,
        size: int,
        cores: int | None = None,
        names: Sequence[int] | None = None,
        absent: Sequence[int] = (),
        join_timeout_s: float = 60.0,
    ) -> None:
        self.size = size
        self.arena = Arena.create()
        block = self.arena.allocate(control_bytes(size))
        self.words = self.arena.words(block, Layout(size).words)
        options = {"names": names, "cores": cores, "join_timeout_s": join_timeout_s}
        self._connections: dict[int, Connection] = {}
        self.processes = {}
        for rank in range(size):
            if rank in absent:
                continue
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, self.arena.address, block, rank, size, options), daemon=True
            )
            process.start()
            theirs.close()
            self._connections[rank], self.processes[rank] = ours, process

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, process in self.processes.items():
            process.kill()
            process.join()
            process.close()
            self._connections[rank].close()
        self.arena.close()

    def start(self, function: Callable, *arguments: object, ranks: Sequence[int] | None = None) -> None:
        """Call `function(comm, *arguments)` in all ranks, or in some."""
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

    def run(self, function: Callable, *arguments: object) -> list:
        """Call `function(comm, *arguments)` in all ranks; what they return, or raises what one raises."""
        self.start(function, *arguments)
        ranks = {connection: rank for rank, connection in self._connections.items()}
        outcomes = {}
        while ranks:
            ready = wait(ranks, timeout=60.0)
            if not ready:
                raise TimeoutError(f"ranks {sorted(ranks.values())} have not answered")
            for connection in ready:
                rank = ranks.pop(connection)
                outcomes[rank] = self.outcome(rank)
                if isinstance(outcomes[rank], BaseException):
                    raise outcomes[rank]
        return [outcomes[rank] for rank in sorted(outcomes)]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a rank."""
        os.kill(self.processes[rank].pid, number)


def _serve(connection: Connection, address: Address, block: int, rank: int, size: int, options: dict) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    from tutti.comm.host import HostCommunicator

    comm: object = None
    while True:
        try:
            function, arguments = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome, trace = None, ""
        try:
            if comm is None:
                comm = HostCommunicator(Arena.open(address), block, rank, size, **options)
            outcome = function(comm, *arguments)
        except Exception as error:
            outcome, trace = error, traceback.format_exc()
        with suppress(BrokenPipeError):
            connection.send_bytes(cloudpickle.dumps((outcome, trace)))
