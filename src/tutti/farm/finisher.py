"""The last touch of jobs that have come to their end: their files are flushed to the disk, many at a time.

A job writes its files without waiting for the disk, and takes the next one over meanwhile; it counts as
finished once all of them are there for good. If the power goes before, it is done again.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.run_folder import finish_together

EVERY_S: Final = 0.2
"""The least time between two flushes: while the disk takes one, jobs wait that make or rename a file."""


class Finisher:
    """A thread that gives jobs their last touch, for the length of the context: its end waits for all."""

    def __init__(self) -> None:
        self._folders: SimpleQueue[Path | None] = SimpleQueue()
        self._error: BadRunFolder | None = None
        self._thread = Thread(target=self._run, name="tutti-finisher", daemon=True)

    def add(self, folder: Path) -> None:
        """Have a job finished.

        Raises:
            BadRunFolder: an earlier one could not be.
        """
        self._check()
        self._folders.put(folder)

    def __enter__(self) -> Finisher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folders.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        found, flushed = list[Path | None](), -math.inf
        while None not in found and self._error is None:
            found = [self._folders.get()]
            with suppress(Empty):
                while None not in found:
                    left = flushed + EVERY_S - time.monotonic()
                    found.append(self._folders.get(timeout=max(0.0, left)))
            try:
                finish_together([folder for folder in found if folder is not None])
            except BadRunFolder as error:
                self._error = error
            flushed = time.monotonic()
