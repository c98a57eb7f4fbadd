"""The bar that a download draws, on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.terminal import console_on


class DownloadBar:
    """A progress bar with the four things that pooch asks of one: `total`, `update`, `reset` and `close`.

    Where standard error is no terminal it is one line that says what is downloaded.

    Args:
        name: what is downloaded, from where.
    """

    def __init__(self, name: str) -> None:
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
        """How many bytes there are, once known."""
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: float) -> None:
        self._progress.update(self._task, total=size)

    def update(self, size: int) -> None:
        """So many more bytes have come."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Back to nothing: pooch resets before it fills the bar for good."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """All bytes have come."""
        self._progress.refresh()
