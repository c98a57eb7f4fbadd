"""Small runs without the processes that each has of its own: those take longer to start than the run takes.

A writer of checkpoints serves one run after the other.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from tutti.checkpoint.writer_process import Writer

_idle: list[tuple[subprocess.Popen[bytes], Connection]] = []


class KeptWriter(Writer):
    """A writer that leaves its process to the next one, unless it is still at work."""

    def close(self) -> None:
        process, connection = self._process, self._connection
        if process is not None and connection is not None and self._step is None and process.poll() is None:
            _idle.append((process, connection))
            self._process = self._connection = None
        super().close()

    def _start(self) -> None:
        if _idle:
            self._process, self._connection = _idle.pop()
            if self._process.poll() is None:
                return
        super()._start()


@contextmanager
def keeping_writers() -> Iterator[None]:
    """Have all runs of this process use such writers; the idle ones stay until `end_writers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tutti.checkpoint.saver.Writer", KeptWriter)
        yield


def end_writers() -> None:
    while _idle:
        process, connection = _idle.pop()
        with process, connection:
            process.kill()


@contextmanager
def nothing_beside_runs() -> Iterator[None]:
    """Keep the writers of the runs of this process until the end of the block."""
    with keeping_writers():
        try:
            yield
        finally:
            end_writers()
