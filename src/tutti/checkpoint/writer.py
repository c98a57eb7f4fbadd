"""A rank's side of the process that writes checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final, cast

from tutti.checkpoint.writer_process import PROGRAM, Order, WriterAnswer

_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""The variables of the environment that the process gets: with others it would take itself for a rank."""


class Writer:
    """The process that writes checkpoints.

    It starts with the first checkpoint, as many runs end before that, and again after it was killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._step: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it was writing at the last `poll`."""
        return self._step is not None

    def give(self, order: Order) -> None:
        """Order a checkpoint; call this only when it is not busy."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        self._step = order.step
        with suppress(ConnectionError):  # `poll` reports that the process is gone
            self._connection.send(order)

    def poll(self, timeout_s: float | None = 0.0) -> WriterAnswer | None:
        """Return the outcome of the order, once; None: there is none yet. No limit: wait."""
        if self._step is None or self._connection is None or not self._connection.poll(timeout_s):
            return None
        step, self._step = self._step, None
        try:
            return cast("WriterAnswer", self._connection.recv())
        except (EOFError, ConnectionError):
            self.close()
            return WriterAnswer(step, "the process that writes it was killed")

    def close(self) -> None:
        """End the process at once."""
        self._step = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._connection, theirs = Pipe()
        with theirs:
            start = [os.getpid(), theirs.fileno(), [str(path) for path in sys.path]]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(start)],
                stdin=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the ranks
            )
