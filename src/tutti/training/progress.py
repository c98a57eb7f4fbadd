"""The progress of a run, shown by rank 0: a bar on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TextIO

from typing_extensions import override

from tutti.records.heartbeat import TESTING, VALIDATING
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.texts import RunLength, duration, epoch_text, figures

REFRESH_S = 0.2
"""Seconds between two refreshes of a terminal."""

NOTEBOOK_COLUMNS = 110
"""The width of a notebook's lines, in characters."""

_AROUND = 16
"""The characters of a bar's line for its share, the time left and the spaces between all."""

LINE_S = 10.0
"""Seconds between two lines of a long epoch, without a terminal."""


@dataclass(frozen=True)
class Moment:
    """The state of a run in the middle of an epoch."""

    epoch: int  # from 1
    step: int  # weight updates made since the run began
    train: Evaluation  # on this rank's part of the epoch so far
    samples_per_s: float  # of all ranks in this epoch so far


class Progress:
    """A display of a run; the base class shows nothing.

    The calls come in the order `begin`, (`moment`..., `doing`..., `epoch`)..., `end`.

    Attributes:
        every_s: seconds between two calls of `moment`.
    """

    every_s = math.inf

    def begin(self, span: RunLength, step: int = 0) -> None:
        """Training begins, or is resumed after `step` updates."""

    def moment(self, moment: Moment) -> None:
        """An epoch goes on."""

    def doing(self, what: str, step: int | None = None) -> None:
        """The rank enters a state of `tutti.records.heartbeat`, after `step` updates if given."""

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

    @override
    def begin(self, span: RunLength, step: int = 0) -> None:
        self._span, self._began, self._first, self._step = span, time.monotonic(), step, step

    @override
    def moment(self, moment: Moment) -> None:
        begun = (moment.epoch - 1) * self._span.per_epoch
        done = (self._span.place(moment.step) - begun) / min(self._span.per_epoch, self._span.updates - begun)
        self._print(moment.step, f"{self._span.label(moment.epoch)}  {done:4.0%}", _moment_text(moment))

    @override
    def epoch(self, record: EpochRecord) -> None:
        self._print(record.step, self._span.label(record.epoch), epoch_text(record))

    def _print(self, step: int, *parts: str) -> None:
        # The record of an epoch may come while later ones are being trained.
        self._step = step = max(step, self._step)
        made, to_go = step - self._first, self._span.last - step
        if made > 0 and to_go > 0:
            parts += (f"{duration((time.monotonic() - self._began) / made * to_go)} left",)
        print(*parts, sep="  ", file=self._stream, flush=True)


class Bar(Progress):
    """A rich bar on a terminal or in a notebook, and one line for each epoch above it, unless `quiet`."""

    every_s = REFRESH_S

    def __init__(self, stream: TextIO, notebook: bool = False, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        from tutti.terminal import console_on

        class Notebook(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False

        self._quiet, self._padded = quiet, NOTEBOOK_COLUMNS if notebook else 0
        console = console_on(stream, columns=None)
        if notebook:
            console = Notebook(
                file=stream,
                width=NOTEBOOK_COLUMNS,
                force_terminal=True,
                force_jupyter=False,
                color_system=None,
                _environ={},
            )
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=min(20, console.width // 8)),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        )
        self._room = console.width - min(20, console.width // 8) - _AROUND
        # No extra thread refreshes the bar: it would take time from the ranks.
        self._bar = Progress(
            *columns, console=console, auto_refresh=False, transient=not notebook, expand=notebook
        )
        self._task = self._bar.add_task("", figures="")
        self._span, self._step = RunLength(0, 1), 0

    @override
    def begin(self, span: RunLength, step: int = 0) -> None:
        self._span = span
        # The time left is estimated from the updates after this.
        self._bar.reset(self._task, total=span.updates, completed=span.place(step))
        self._bar.start()
        self._show(span.epoch_behind(step), step, "")

    @override
    def moment(self, moment: Moment) -> None:
        self._show(moment.epoch, moment.step, _moment_text(moment))

    @override
    def epoch(self, record: EpochRecord) -> None:
        if not self._quiet:
            line = f"{self._span.label(record.epoch)}  {epoch_text(record)}".ljust(self._padded)
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
        # The record may come while later epochs are being trained.
        if record.step >= self._step:
            self._show(record.epoch, record.step, "")

    @override
    def doing(self, what: str, step: int | None = None) -> None:
        if what in (VALIDATING, TESTING):
            self._bar.update(self._task, figures=what, refresh=True)

    @override
    def end(self) -> None:
        self._bar.stop()

    def _show(self, epoch: int, step: int, text: str) -> None:
        label, self._step = self._span.label(epoch), step
        while len(label) + len(text) > self._room:
            text = text.rpartition("  ")[0]
        completed = self._span.place(step)
        self._bar.update(self._task, completed=completed, description=label, figures=text, refresh=True)


class Several(Progress):
    """Several displays of a run, each called at its own interval."""

    def __init__(self, *displays: Progress) -> None:
        self.every_s = min(one.every_s for one in displays)
        self._due = dict.fromkeys(displays, 0.0)

    @override
    def begin(self, span: RunLength, step: int = 0) -> None:
        for one in self._due:
            one.begin(span, step)
            self._due[one] = time.monotonic() + one.every_s

    @override
    def moment(self, moment: Moment) -> None:
        now = time.monotonic()
        for one, due in self._due.items():
            if now >= due:
                one.moment(moment)
                self._due[one] = now + one.every_s

    @override
    def doing(self, what: str, step: int | None = None) -> None:
        for one in self._due:
            one.doing(what, step)

    @override
    def epoch(self, record: EpochRecord) -> None:
        for one in self._due:
            one.epoch(record)
            self._due[one] = time.monotonic() + one.every_s

    @override
    def end(self) -> None:
        for one in self._due:
            one.end()


def progress_on(
    stream: TextIO, rank: int = 0, bar: bool = True, notebook: bool = False, quiet: bool = False
) -> Progress:
    """Return the display of a rank: a bar, lines where that is impossible, nothing on ranks other than 0.

    A `quiet` one has no lines.
    """
    if rank == 0 and (notebook or (bar and stream.isatty())):
        return Bar(stream, notebook, quiet)
    return Progress() if quiet or rank != 0 else PlainLines(stream)


def _moment_text(moment: Moment) -> str:
    return f"{figures(moment.train)}  {moment.samples_per_s:,.0f} samples/s"
