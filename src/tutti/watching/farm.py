"""The display of a farm: a table on a terminal, lines elsewhere. Needs no torch.

Its input is the coordinator of a farm, or for `tutti watch FARM` the records in the folder.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tutti.launch.launcher import mpi_place
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.records.texts import duration, figures, loss_text, printable
from tutti.tables import TextTable, progress_bar
from tutti.terminal import console_on
from tutti.watching.follow import REFRESH_S, Clock

REDRAWN_S: Final = 0.2
"""The least seconds between two drawings of the table."""


@dataclass
class BlockRow:
    """The current work of a block."""

    job: str
    began: float
    record: EpochRecord | None = None


@dataclass
class FarmProgress:
    """The progress of a farm."""

    epochs: Mapping[str, int | None]  # by job; None: it has a number of steps. Empty: no job is known yet
    done: dict[str, JobState] = field(default_factory=dict)  # by job
    rows: dict[int, BlockRow] = field(default_factory=dict)  # by block
    _seconds: list[float] = field(default_factory=list)
    _blocks: int = 1

    def begin(self, job: str, block: int, now: float) -> None:
        """Note that a block begins a job."""
        self.done.pop(job, None)
        # Another block may have worked on the job before.
        self.rows = {number: row for number, row in self.rows.items() if row.job != job}
        self.rows[block] = BlockRow(job, now)
        self._blocks = max(self._blocks, len(self.rows))

    def found(self, job: str, state: JobState) -> None:
        """Note a job that ended in another launch."""
        self.done[job] = state

    def epoch(self, block: int, record: EpochRecord) -> None:
        """Note an epoch of the job of a block."""
        self.rows[block].record = record

    def end(self, block: int, state: JobState, seconds: float) -> None:
        """Note the end of the job of a block."""
        self.done[self.rows.pop(block).job] = state
        if state is JobState.FINISHED:
            self._seconds.append(seconds)

    def left_s(self, now: float) -> float | None:
        """Estimate the remaining seconds by the mean of finished jobs; None if there are none."""
        if not self._seconds or not self.epochs:
            return None
        usual = fmean(self._seconds)
        running = {row.job: row.began for row in self.rows.values()}
        to_do = [job for job in self.epochs if job not in self.done]
        return sum(max(0.0, usual - (now - running.get(job, now))) for job in to_do) / self._blocks

    def headline(self, now: float) -> str:
        """Return a description of the farm in one line."""
        counted = Counter(self.done.values())
        of = f" of {len(self.epochs)}" if self.epochs else ""
        text = f"{counted[JobState.FINISHED]}{of} jobs done, {len(self.rows)} running"
        for state in (JobState.STOPPED, JobState.FAILED):
            text += f", {counted[state]} {state.value}" if counted[state] else ""
        left = self.left_s(now)
        return text + (f", {duration(left)} left" if left is not None and self.rows else "")

    def screen(self, now: float) -> RenderableType:
        """Return the display on a terminal."""
        heads = ("job", "block", "epoch", "loss", "validation", "time")
        table = TextTable(heads, left=("validation",), drop=("block", "loss"))
        for block, row in sorted(self.rows.items()):
            record, epochs, cells = row.record, self.epochs.get(row.job), ["", "", ""]
            if record is not None:
                epoch = f"{record.epoch}" if epochs is None else f"{record.epoch}/{epochs}"
                validation = figures(record.validation) if record.validation else ""
                cells = [epoch, loss_text(record.train.loss), validation]
            table.add_row(row.job, str(block), *cells, duration(now - row.began))
        parts: list[RenderableType] = [Text(self.headline(now))]
        if self.epochs:
            parts.append(progress_bar(total=len(self.epochs), completed=len(self.done)))
        return Group(*parts, *([table] if self.rows else []))


def known_jobs(folder: FarmFolder) -> dict[str, int | None]:
    """Return the number of epochs of each job of a farm's plan, by name."""
    return {name: config.get("epochs") for name, config in folder.plan.jobs.items()}


class FarmDisplay:
    """The display of a running farm."""

    def __init__(self, known: Mapping[str, JobState], stream: IO[str]) -> None:
        self._stream, self._drawn, self._shown = stream, 0.0, dict(known)
        self._live = None
        # Under mpirun the processes of several hosts may share a terminal, and overwrite their tables.
        if stream.isatty() and mpi_place(os.environ) is None:
            # A thread that refreshes the screen would take time from the ranks.
            self._live = Live(console=console_on(stream), auto_refresh=False, transient=True)
            self._live.start()

    def show(self, progress: FarmProgress, now: float) -> None:
        """Show the progress: on a terminal every `REDRAWN_S`, elsewhere a line for each job that ends."""
        if self._live is not None:
            if now - self._drawn >= REDRAWN_S or not progress.rows:
                self._live.update(progress.screen(now), refresh=True)
                self._drawn = now
            return
        for job, state in progress.done.items():
            # A job that was taken over ends twice.
            if self._shown.get(job) is state:
                continue
            self._shown[job] = state
            ended = f"{printable(job)} {state.value}"
            print(f"{ended}; {progress.headline(now)}", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the table."""
        if self._live is not None:
            self._live.stop()


def read_progress(folder: FarmFolder) -> FarmProgress:
    """Read the progress of a farm from its records."""
    progress = FarmProgress(known_jobs(folder))
    for event in folder.events().records:
        if event.event == "began":
            progress.begin(event.job, event.block, event.time)
        elif event.block in progress.rows and progress.rows[event.block].job == event.job:
            progress.end(event.block, JobState(event.state), event.seconds)
    for block, row in list(progress.rows.items()):
        # A killed farm has not recorded the end of the job.
        if folder.state(row.job) is not JobState.RUNNING:
            del progress.rows[block]
            continue
        run = RunFolder(folder.job(row.job))
        history = run.lines(EpochRecord).records
        row.record = history[-1] if history else None
    return progress


def follow_farm(path: Path, stream: IO[str], once: bool = False, clock: Clock | None = None) -> bool:
    """Show a farm until no process works on it; return whether all jobs have finished."""
    folder, clock = FarmFolder.open(path), clock or Clock()
    progress = read_progress(folder)
    if once:
        console_on(stream).print(progress.screen(clock.now()))
        if not folder.worked_on:
            print(f"no process works on it; results: tutti report {shlex.quote(str(path))}", file=stream)
        return JobState.FAILED not in progress.done.values()
    display = FarmDisplay(progress.done, stream)
    try:
        while folder.worked_on:
            display.show(progress := read_progress(folder), clock.now())
            clock.sleep(REFRESH_S)
    finally:
        display.close()
    progress = read_progress(folder)
    finished = all(progress.done.get(job) is JobState.FINISHED for job in progress.epochs or progress.done)
    console_on(stream).print(Text(progress.headline(clock.now())))
    if not finished:
        print("no process works on it; continue with its command and --resume", file=stream, flush=True)
    return finished
