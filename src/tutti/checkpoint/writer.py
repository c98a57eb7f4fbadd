"""A rank's side of the process that writes checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from tutti.checkpoint.writer_process import (
    KILLED,
    PATIENCE_S,
    PROGRAM,
    Order,
    StopWatch,
    WriterAnswer,
    WriterStart,
    is_ready,
    send_order,
)
from tutti.records.json_lines import parse_record

_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""The variables of the environment that the process gets: with others it would take itself for a rank."""


@dataclass(frozen=True)
class _Asked:
    """A checkpoint that is being written.

    Attributes:
        step: of the checkpoint.
        since_s: when it was asked for.
        stops: looks at the process; None: there is none.
        failure: why it is not written, unless the process says so or is stopped.
    """

    step: int
    since_s: float
    stops: StopWatch | None
    failure: str


class Writer:
    """The process that writes the checkpoints of a host.

    It is started for the first one, as many runs are over before that, and again when it was killed; one that
    was stopped, and does not go on, is.

    Args:
        patience_s: how long files may take at idle priority, beside what their sizes account for, and how
            long a process that writes them may be stopped.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._asked: _Asked | None = None

    @property
    def busy_s(self) -> float | None:
        """For how long it has been writing, as far as the last `poll` has shown; None: it is not."""
        return time.monotonic() - self._asked.since_s if self._asked else None

    def give(self, order: Order, memory: int) -> None:
        """Have a checkpoint written; call this only when it has nothing to do.

        Args:
            order: what to write.
            memory: the descriptor of the memory that has it. Nobody may change it before `poll` has returned.
        """
        failure, stops = KILLED, None
        if self._process is None or self._process.poll() is not None:
            try:
                self._start()
            except OSError as error:
                failure = f"the process that writes it cannot be started: {error.strerror}"
        if self._process is not None:
            stops = StopWatch(self._process.pid, self._patience_s)
        self._asked = _Asked(order.step, time.monotonic(), stops, failure)
        if self._connection is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # `poll` tells that it is gone
                send_order(self._connection, order, memory)

    def poll(self, timeout_s: float | None = 0.0) -> WriterAnswer | None:
        """Return the outcome of the order, once; None: there is none yet, or nothing was ordered.

        Args:
            timeout_s: how long to wait for it; None: as long as it takes.
        """
        if (asked := self._asked) is None:
            return None
        failure = asked.failure
        if asked.stops is not None and self._connection is not None:
            if is_ready(self._connection, timeout_s, asked.stops):
                with suppress(ConnectionResetError), self._connection.makefile("rb") as stream:
                    if line := stream.readline():
                        self._asked = None
                        return parse_record(line, WriterAnswer)
            elif asked.stops.over:
                failure = asked.stops.failure
            else:
                return None
        self.close()
        return WriterAnswer(asked.step, failure)

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
        connection, theirs = socket.socketpair()
        start = WriterStart(os.getpid(), [str(path) for path in sys.path], theirs.fileno(), self._patience_s)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(asdict(start))],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the ranks
            )
        self._connection = connection
