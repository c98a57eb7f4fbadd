"""The last touch of jobs that have come to their end: their files are flushed to the disk, many at a time.

A job writes its files without waiting for the disk, and takes the next one over meanwhile; it counts as
finished once all of them are there for good. If the power goes before, it is done again.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final

from typing_extensions import override

from tutti.records.run_folder import finish_together

EVERY_S: Final = 0.2
"""The least time between two flushes: while the disk takes one, jobs wait that make or rename a file."""


class Finisher(AbstractContextManager["Finisher"]):
    """A thread that gives jobs their last touch, for the length of the context: its end waits for all."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tutti-finisher")
        self._folders = SimpleQueue[Path]()
        self._flushes: list[Future[None]] = []

    def add(self, folder: Path) -> None:
        """Have a job finished."""
        self._folders.put(folder)
        self._flushes.append(self._thread.submit(self._flush))
        while self._flushes and self._flushes[0].done():
            self._flushes.pop(0).result()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None:
            for flush in self._flushes:
                flush.result()

    def _flush(self) -> None:
        """Flush all jobs that wait; a later call may find none."""
        found = list[Path]()
        with suppress(Empty):
            while True:
                found.append(self._folders.get_nowait())
        if found:
            finish_together(found)
            time.sleep(EVERY_S)
