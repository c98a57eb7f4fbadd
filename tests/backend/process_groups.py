"""Starts ranks of a tutti process group as processes, and calls functions in them.

The processes are forked from a server that has torch imported, and live as long as the test module.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import set_forkserver_preload

import cloudpickle
from torch.distributed import TCPStore

PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed", "tutti.backend.group"])


class Ranks:
    """Processes that are, or can become, ranks of a job, for `with`; what is left is killed at the end.

    Args:
        size: how many.
        backend: joined before the first call; None: the functions join themselves.
        timeout_s: of the default group.

    Attributes:
        store: where they meet.
        processes: by rank.
    """

    def __init__(self, size: int, backend: str | None = "tutti", timeout_s: float = 60.0) -> None:
        self.size = size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, size, self.store.port, backend, timeout_s)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            process.close()
            connection.close()

    def start(self, function: Callable, *arguments: object, ranks: Sequence[int] | None = None) -> None:
        """Call `function(rank, *arguments)` in all ranks, or in some."""
        message = cloudpickle.dumps((function, arguments))
        for rank in range(self.size) if ranks is None else ranks:
            self._connections[rank].send_bytes(message)

    def outcome(self, rank: int, timeout_s: float = 60.0) -> object:
        """What the call returned in `rank`, or raised there."""
        if not self._connections[rank].poll(timeout_s):
            raise TimeoutError(f"rank {rank} has not answered within {timeout_s} s")
        outcome, trace = cloudpickle.loads(self._connections[rank].recv_bytes())
        if isinstance(outcome, BaseException):
            outcome.add_note(f"rank {rank}:\n{trace}")
        return outcome

    def run(self, function: Callable, *arguments: object) -> list:
        """Call `function(rank, *arguments)` in all ranks; what they return, or raises what one raises."""
        self.start(function, *arguments)
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
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


def _serve(
    connection: Connection, rank: int, size: int, port: int, backend: str | None, timeout_s: float
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from torch import distributed

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            function, arguments = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome, trace = None, ""
        try:
            if backend is not None and not distributed.is_initialized():
                distributed.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                )
            outcome = function(rank, *arguments)
        except Exception as error:
            outcome, trace = error, traceback.format_exc()
        with suppress(BrokenPipeError):
            connection.send_bytes(cloudpickle.dumps((outcome, trace)))
