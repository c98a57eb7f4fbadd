"""The progress of a run, shown by rank 0 only: a bar on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TextIO

from tutti.records.heartbeat import SAVING
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.texts import RunLength, duration, epoch_text, figures

REFRESH_S = 0.2
"""Seconds between two refreshes of a terminal."""

BAR_WIDTH = 20
"""Letters of a notebook's bar."""

SETTLED_S = 5.0
"""The seconds of training since a run went on from which on they tell how long the rest will take.

Few steps, the first one of which takes longer, would say next to nothing.
"""

LINE_S = 10.0
"""Seconds between two lines of a long epoch, without a terminal."""


@dataclass(frozen=True)
class Moment:
    """The state of a run in the middle of an epoch.

    Attributes:
        epoch: number of the epoch, from 1.
        step: weight updates made since the run began.
        train: on this rank's part of the epoch so far.
        samples_per_s: training samples of all ranks per second in this epoch so far.
        seconds: of training since the epoch began.
    """

    epoch: int
    step: int
    train: Evaluation
    samples_per_s: float
    seconds: float = 0.0


class Progress:
    """A display of a run; by itself it shows nothing.

    The calls come in the order `begin`, (`moment`..., `doing`..., `epoch`)..., `end`.

    Attributes:
        every_s: seconds between two calls of `moment`.
    """

    every_s = math.inf

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Training begins, or goes on after `step` updates."""

    def moment(self, moment: Moment) -> None:
        """An epoch goes on."""

    def doing(self, what: str) -> None:
        """The rank does something else than to train: one of the states of `tutti.records.heartbeat`."""

    def stopping(self, step: int) -> None:
        """The run saves its state, to stop after `step` updates."""
        self.doing(SAVING)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended."""

    def end(self) -> None:
        """Training has ended, with or without an error."""


class PlainLines(Progress):
    """Plain lines: one for each epoch, and one every `every_s` seconds in epochs that take longer."""

    every_s = LINE_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._span, self._began, self._first, self._step = RunLength(0, 1), 0.0, 0, 0

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Remember how long the run is, for the time left."""
        self._span, self._began, self._first, self._step = span, time.monotonic(), step, step

    def moment(self, moment: Moment) -> None:
        """Print how much of the epoch is done."""
        begun = (moment.epoch - 1) * self._span.per_epoch
        done = (self._span.place(moment.step) - begun) / min(self._span.per_epoch, self._span.updates - begun)
        start = f"{self._span.label(moment.epoch)}  {done:4.0%}"
        self._print(moment.step, start, moment_text(moment))

    def epoch(self, record: EpochRecord) -> None:
        """Print the epoch's figures."""
        self._print(record.step, self._span.label(record.epoch), epoch_text(record))

    def _print(self, step: int, *parts: str) -> None:
        # The record of an epoch may come while later ones are being trained.
        self._step = step = max(step, self._step)
        made, to_go = step - self._first, self._span.last - step
        if made > 0 and to_go > 0 and _has_settled(self._first, passed := time.monotonic() - self._began):
            parts += (f"{duration(passed / made * to_go)} left",)
        print(*parts, sep="  ", file=self._stream, flush=True)


class Live(Progress):
    """A bar on a terminal, by rich, and one line for each epoch above it."""

    every_s = REFRESH_S

    def __init__(self, stream: TextIO) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        from tutti.terminal import console_on

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        # No extra thread refreshes the bar: it would take time from the ranks.
        self._bar = Progress(
            *columns, console=console_on(stream, columns=None), auto_refresh=False, transient=True
        )
        self._task = self._bar.add_task("", figures="")
        self._span, self._step = RunLength(0, 1), 0

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Show the bar as far as the run is."""
        self._span = span
        # The time left is reckoned from what is added to this.
        self._bar.reset(self._task, total=span.updates, completed=span.place(step))
        self._bar.start()
        self._show(span.epoch_behind(step), step, "")

    def moment(self, moment: Moment) -> None:
        """Move the bar."""
        self._show(moment.epoch, moment.step, moment_text(moment))

    def epoch(self, record: EpochRecord) -> None:
        """Print the epoch's line above the bar."""
        line = f"{self._span.label(record.epoch)}  {epoch_text(record)}"
        self._bar.console.print(line, soft_wrap=True)
        # The record may come while later epochs are being trained.
        if record.step >= self._step:
            self._show(record.epoch, record.step, "")

    def end(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _show(self, epoch: int, step: int, text: str) -> None:
        label, self._step = self._span.label(epoch), step
        self._bar.update(
            self._task,
            total=self._span.updates,
            completed=self._span.place(step),
            description=label,
            figures=text,
        )
        self._bar.refresh()


class Redrawn(Progress):
    """A bar in the last line of a notebook's cell, and one line for each epoch above it.

    Notebooks know carriage returns, but none of a terminal's other commands.
    """

    every_s = REFRESH_S

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, 0
        self._span, self._began, self._first, self._step = RunLength(0, 1), 0.0, 0, 0

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Show the bar as far as the run is."""
        self._span, self._began, self._first, self._step = span, time.monotonic(), step, step
        self._draw(span.epoch_behind(step), "")

    def moment(self, moment: Moment) -> None:
        """Move the bar."""
        self._step = max(self._step, moment.step)
        self._draw(moment.epoch, moment_text(moment))

    def epoch(self, record: EpochRecord) -> None:
        """Print the epoch's line, and the bar below it."""
        self._replace(f"{self._span.label(record.epoch)}  {epoch_text(record)}", "\n")
        # The record of an epoch may come while later ones are being trained.
        self._step = max(self._step, record.step)
        self._draw(record.epoch, "")

    def end(self) -> None:
        """Remove the bar."""
        self._replace("", "\r")

    def _draw(self, epoch: int, text: str) -> None:
        share = self._span.place(self._step) / max(1, self._span.updates)
        bar = ("━" * round(BAR_WIDTH * share)).ljust(BAR_WIDTH, "─")
        made, to_go = self._step - self._first, self._span.last - self._step
        passed = time.monotonic() - self._began
        left = passed / made * to_go if made and _has_settled(self._first, passed) else 0.0
        parts = [
            self._span.label(epoch),
            bar,
            f"{share:4.0%}",
            f"{duration(left)} left" if left else "",
            text,
        ]
        self._replace("  ".join(filter(None, parts)))

    def _replace(self, line: str, end: str = "") -> None:
        """Write over the last line; what is longer than the new one is blanked."""
        self._stream.write("\r" + line.ljust(self._shown) + end)
        self._stream.flush()
        self._shown = 0 if end == "\n" else len(line)


class Several(Progress):
    """Several displays of a run, each called as often as it asks for."""

    def __init__(self, *ways: Progress) -> None:
        self.every_s = min(way.every_s for way in ways)
        self._due = dict.fromkeys(ways, 0.0)

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Training begins, or goes on after `step` updates."""
        for way in self._due:
            way.begin(span, step)
        self._wait()

    def moment(self, moment: Moment) -> None:
        """Pass the moment on to the displays that are due."""
        now = time.monotonic()
        for way, due in self._due.items():
            if now >= due:
                way.moment(moment)
                self._due[way] = now + way.every_s

    def doing(self, what: str) -> None:
        """The rank does something else than to train."""
        for way in self._due:
            way.doing(what)

    def stopping(self, step: int) -> None:
        """The run stops."""
        for way in self._due:
            way.stopping(step)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended."""
        for way in self._due:
            way.epoch(record)
        self._wait()

    def end(self) -> None:
        """Training has ended, with or without an error."""
        for way in self._due:
            way.end()

    def _wait(self) -> None:
        now = time.monotonic()
        self._due = {way: now + way.every_s for way in self._due}


def progress_on(stream: TextIO, rank: int = 0, bar: bool = True, notebook: bool = False) -> Progress:
    """Return the display of rank `rank`: a bar, lines where that cannot be, nothing on other ranks than 0.

    Args:
        stream: where it is shown.
        rank: of this process.
        bar: whether whoever looks at a terminal would see one.
        notebook: whether a notebook shows what is written.
    """
    if rank != 0:
        return Progress()
    if notebook:
        return Redrawn(stream)
    return Live(stream) if bar and stream.isatty() else PlainLines(stream)


def _has_settled(first: int, passed_s: float) -> bool:
    """Tell whether the time left can be reckoned, of a run that went on after `first` steps."""
    return not first or passed_s >= SETTLED_S


def moment_text(moment: Moment) -> str:
    """Return the figures of an epoch under way, in one line."""
    return f"{figures(moment.train)}  {moment.samples_per_s:,.0f} samples/s"
