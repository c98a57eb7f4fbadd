"""Follows a run until it ends: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rich.live import Live

from tutti.terminal import console_on
from tutti.training.progress import Span, epoch_text
from tutti.watching.health import Condition, Health, Limits, examine
from tutti.watching.screen import headline, rank_line, remarks, screen
from tutti.watching.snapshot import Snapshot, Watched

REFRESH_S: Final = 1.0
"""How often the records are read."""

LINES_S: Final = 10.0
"""How often a line for each rank is printed where there is no terminal."""


@dataclass
class Clock:
    """What tells the time, and lets it pass."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def show(folder: Path, limits: Limits, stream: IO[str]) -> bool:
    """Show how a run is now.

    Args:
        folder: the run's.
        limits: from when on something is said about a rank.
        stream: where to.

    Returns:
        Whether all is well with it.

    Raises:
        BadRunFolder: it is no folder of a run.
    """
    watched = Watched(folder)
    watched.check()
    run = watched.read(time.time())
    health = examine(run, limits)
    console_on(stream).print(screen(run, health))
    return health.well


def follow(folder: Path, limits: Limits, stream: IO[str], clock: Clock | None = None) -> bool:
    """Show a run until it has finished or failed.

    Args:
        folder: the run's; it may have no records yet.
        limits: from when on something is said about a rank.
        stream: where to.
        clock: tells the time; by default the real one.

    Returns:
        Whether it has finished.

    Raises:
        BadRunFolder: it is no folder of a run, or is gone.
    """
    clock, watched = clock or Clock(), Watched(folder)
    watched.check()
    if not stream.isatty():
        return _follow(watched, limits, clock, Printer(stream).tell)
    # No thread of its own refreshes the screen: it shows the records, which are read when it is time to.
    with Live(console=console_on(stream), auto_refresh=False, vertical_overflow="visible") as live:
        return _follow(
            watched, limits, clock, lambda run, health: live.update(screen(run, health), refresh=True)
        )


def _follow(watched: Watched, limits: Limits, clock: Clock, tell: Callable[[Snapshot, Health], None]) -> bool:
    while True:
        run = watched.read(clock.now())
        health = examine(run, limits)
        tell(run, health)
        if health.condition in (Condition.FINISHED, Condition.FAILED):
            return health.condition is Condition.FINISHED
        clock.sleep(REFRESH_S)


class Printer:
    """Prints what is new about a run, line by line.

    Args:
        stream: where to.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._epochs, self._said = 0, ""
        self._remarks: set[str] = set()
        self._due = 0.0

    def tell(self, run: Snapshot, health: Health) -> None:
        """Print the epochs and the troubles that are new, and now and then how each rank is."""
        if health.condition.value != self._said:
            self._said = health.condition.value
            self._print(headline(run, health))
        span = next((Span(beat.updates, beat.per_epoch) for beat in run.beats if beat.updates), None)
        for record in run.history[self._epochs :]:
            label = span.label(record.epoch) if span else f"epoch {record.epoch}"
            self._print(f"{label}  {epoch_text(record)}")
        self._epochs = len(run.history)
        remarks_now = dict.fromkeys(text for _, text in remarks(run, health))
        known = {_kind(text) for text in self._remarks}
        for text in remarks_now:
            if _kind(text) not in known:
                self._print(text)
        self._remarks = set(remarks_now)
        if health.condition is Condition.RUNNING and run.now >= self._due:
            self._due = run.now + LINES_S
            for beat in run.beats:
                self._print(rank_line(run, beat))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _kind(text: str) -> str:
    """A remark without its numbers, which change from one look to the next."""
    return "".join("0" if letter.isdigit() else letter for letter in text)
