"""The bar that a download draws, on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.terminal import console_on


class DownloadLimits:
    """The limits of a download in bytes and in time.

    Args:
        most_bytes: of the whole download.
        most_s: seconds from now on.
    """

    def __init__(self, most_bytes: int, most_s: float) -> None:
        self._most_bytes, self._most_s = most_bytes, most_s
        self._bytes, self._began = 0, time.monotonic()

    def count(self, size: int) -> None:
        """So many more bytes have come.

        Raises:
            ValueError: they are too many, or took too long.
        """
        self._bytes += size
        self.expect(self._bytes)
        if time.monotonic() - self._began > self._most_s:
            raise ValueError(f"only {self._bytes:,} bytes of it came in {self._most_s:g} s")

    def expect(self, size: float) -> None:
        """So many bytes will have come in all.

        Raises:
            ValueError: they are too many.
        """
        if size > self._most_bytes:
            raise ValueError(f"it has more than {self._most_bytes:,} bytes")

    def restart(self) -> None:
        """The bytes are counted from none again."""
        self._bytes = 0


class DownloadBar:
    """A progress bar with the four things that pooch asks of one: `total`, `update`, `reset` and `close`.

    Where standard error is no terminal it is one line that says what is downloaded.

    Args:
        name: what is downloaded, from where.
        limits: of the download, which it ends.
    """

    def __init__(self, name: str, limits: DownloadLimits) -> None:
        self._limits = limits
        console = console_on(sys.stderr, columns=None)
        columns = (
            TextColumn("downloading {task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(name, total=None)
        if not console.is_terminal:
            console.print(f"downloading {name}")

    def __enter__(self) -> DownloadBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def total(self) -> float | None:
        """The number of bytes, once known."""
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: float) -> None:
        self._limits.expect(size)
        self._progress.update(self._task, total=size)

    def update(self, size: int) -> None:
        """So many more bytes have come.

        Raises:
            ValueError: they are too many, or took too long.
        """
        self._limits.count(size)
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Back to nothing: pooch resets before it fills the bar for good."""
        self._limits.restart()
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """All bytes have come."""
        self._progress.refresh()
