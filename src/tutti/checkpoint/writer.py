"""A rank's side of the process that writes checkpoints."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from tutti.checkpoint.writer_process import (
    KILLED,
    PATIENCE_S,
    PROGRAM,
    Answer,
    Order,
    WriterStart,
    send_order,
)
from tutti.records.json_lines import parse_record

_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""The variables of the environment that the process gets: with others it would take itself for a rank."""


class Writer:
    """The process that writes the checkpoints of a host. It is started again when it was killed.

    Args:
        patience_s: how long files may take at idle priority, beside what their sizes account for.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._asked: tuple[int, float] | None = None
        self._start()

    @property
    def busy_s(self) -> float | None:
        """For how long it has been writing, as far as the last `poll` has shown; None: it is not."""
        return time.monotonic() - self._asked[1] if self._asked else None

    def give(self, order: Order, memory: int) -> None:
        """Have a checkpoint written; call this only when it has nothing to do.

        Args:
            order: what to write.
            memory: the descriptor of the memory that has it. Nobody may change it before `poll` has returned.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None, "it is started"
        self._asked = order.step, time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # `poll` tells that it is gone
            send_order(self._connection, order, memory)

    def poll(self, timeout_s: float | None = 0.0) -> Answer | None:
        """Return the outcome of the order, once; None: there is none yet, or nothing was ordered.

        Args:
            timeout_s: how long to wait for it; None: as long as it takes.
        """
        if self._asked is None or self._connection is None:
            return None
        readable, _, _ = select.select([self._connection], [], [], timeout_s)
        if not readable:
            return None
        (step, _), self._asked = self._asked, None
        with suppress(ConnectionResetError), self._connection.makefile("rb") as stream:
            if line := stream.readline():
                return parse_record(line, Answer)
        self.close()
        return Answer(step, KILLED)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._asked = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._connection, theirs = socket.socketpair()
        start = WriterStart(os.getpid(), [str(path) for path in sys.path], theirs.fileno(), self._patience_s)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(asdict(start))],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the ranks
            )
