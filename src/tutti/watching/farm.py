"""The display of a farm: a table on a terminal, lines elsewhere. Needs no torch.

`tutti cv` feeds it from what its coordinator tells, `tutti watch FARM` from the records in the folder.
"""

from __future__ import annotations

import os
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
from tutti.records.texts import duration, figures
from tutti.records.untrusted import printable
from tutti.tables import TextTable, progress_bar
from tutti.terminal import console_on
from tutti.watching.follow import REFRESH_S, Clock

REDRAWN_S: Final = 0.2
"""The least time between two drawings of the table."""


@dataclass
class BlockRow:
    """The work of a block."""

    job: str
    began: float
    record: EpochRecord | None = None


@dataclass
class FarmProgress:
    """The progress of a farm."""

    epochs: Mapping[str, int | None]  # of each job; None: it has steps. Empty: no job is known yet
    done: dict[str, JobState] = field(default_factory=dict)
    lanes: dict[int, BlockRow] = field(default_factory=dict)
    _seconds: dict[str, list[float]] = field(default_factory=dict)
    _blocks: int = 1

    def begin(self, job: str, block: int, now: float) -> None:
        """Note that a block has begun to work on a job."""
        self.done.pop(job, None)
        # It may have been taken over.
        self.lanes = {number: lane for number, lane in self.lanes.items() if lane.job != job}
        self.lanes[block] = BlockRow(job, now)
        self._blocks = max(self._blocks, len(self.lanes))

    def found(self, job: str, state: JobState) -> None:
        """Note how a job has ended that no block of these has worked on."""
        self.done[job] = state

    def epoch(self, block: int, record: EpochRecord) -> None:
        """Note an epoch of a block's job."""
        self.lanes[block].record = record

    def end(self, block: int, state: JobState, seconds: float) -> None:
        """Note how the job of a block has ended."""
        lane = self.lanes.pop(block)
        self.done[lane.job] = state
        if state is JobState.FINISHED:
            self._seconds.setdefault(_group(lane.job), []).append(seconds)

    def left_s(self, now: float) -> float | None:
        """Estimate the seconds that are left; None: nothing is known yet."""
        if not self._seconds or not self.epochs:
            return None
        known = {group: fmean(found) for group, found in self._seconds.items()}
        usual = fmean(known.values())
        running = {lane.job: lane.began for lane in self.lanes.values()}
        left = 0.0
        for job in self.epochs:
            if job not in self.done:
                expected = known.get(_group(job), usual)
                left += max(0.0, expected - (now - running[job] if job in running else 0.0))
        return left / self._blocks

    def headline(self, now: float) -> str:
        """Describe the farm in one line."""
        counted = Counter(self.done.values())
        of = f" of {len(self.epochs)}" if self.epochs else ""
        text = f"{counted[JobState.FINISHED]}{of} jobs done, {len(self.lanes)} running"
        for state in (JobState.STOPPED, JobState.FAILED):
            text += f", {counted[state]} {state.value}" if counted[state] else ""
        left = self.left_s(now)
        return text + (f", {duration(left)} left" if left is not None and self.lanes else "")

    def screen(self, now: float) -> RenderableType:
        """Return all that is shown."""
        heads = ("job", "block", "epoch", "loss", "validation", "time")
        table = TextTable(heads, left=("validation",), drop=("block", "loss"))
        for block, lane in sorted(self.lanes.items()):
            job, *figures = self._cells(lane)
            table.add_row(job, str(block), *figures, duration(now - lane.began))
        parts: list[RenderableType] = [Text(self.headline(now))]
        if self.epochs:
            parts.append(progress_bar(total=len(self.epochs), completed=len(self.done)))
        return Group(*parts, table)

    def _cells(self, lane: BlockRow) -> list[str]:
        """Return the job, its epoch, and the figures of that."""
        record, epochs = lane.record, self.epochs.get(lane.job)
        if record is None:
            return [lane.job, "", "", ""]
        of = "" if epochs is None else f"/{epochs}"
        validation = figures(record.validation) if record.validation else ""
        return [lane.job, f"{record.epoch}{of}", f"{record.train.loss:.4f}", validation]


def known_jobs(folder: FarmFolder) -> dict[str, int | None]:
    """Return how many epochs each job of a farm's plan is to have, by name."""
    return {name: config.get("epochs") for name, config in folder.plan.jobs.items()}


class FarmDisplay:
    """The display of a farm that goes on."""

    def __init__(self, known: Mapping[str, JobState], stream: IO[str]) -> None:
        self._stream, self._drawn, self._told = stream, 0.0, dict(known)
        self._live = None
        # mpirun gives a terminal to processes of several hosts, whose tables would overwrite each other.
        if stream.isatty() and mpi_place(os.environ) is None:
            # No extra thread refreshes the screen: it would take time from the ranks.
            self._live = Live(console=console_on(stream), auto_refresh=False, transient=True)
            self._live.start()

    def show(self, progress: FarmProgress, now: float) -> None:
        """Show the progress: on a terminal not more often than can be seen, else a line for each job."""
        if self._live is not None:
            if now - self._drawn >= REDRAWN_S or not progress.lanes:
                self._live.update(progress.screen(now), refresh=True)
                self._drawn = now
            return
        for job, state in progress.done.items():
            # One that was taken over has ended twice.
            if self._told.get(job) is state:
                continue
            self._told[job] = state
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
        elif event.block in progress.lanes and progress.lanes[event.block].job == event.job:
            progress.end(event.block, JobState(event.state), event.seconds)
    for block, lane in list(progress.lanes.items()):
        # A farm that was killed has noted no end.
        if folder.state(lane.job) is not JobState.RUNNING:
            del progress.lanes[block]
            continue
        lane.record = _last_record(folder.job(lane.job))
    return progress


def _last_record(path: Path) -> EpochRecord | None:
    """Return the record of a run's newest epoch; None: the first one goes on."""
    run = RunFolder(path)
    history = run.lines(EpochRecord).records
    return history[-1] if history else None


def follow_farm(path: Path, stream: IO[str], once: bool = False, clock: Clock | None = None) -> bool:
    """Show a farm until no process works on it; return whether all of its jobs have finished."""
    folder, clock = FarmFolder.open(path), clock or Clock()
    progress = read_progress(folder)
    if once:
        console_on(stream).print(progress.screen(clock.now()))
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
        print("nobody works on it: the command that began it goes on with --resume", file=stream, flush=True)
    return finished


def _group(job: str) -> str:
    """Return the name of the candidate that a job belongs to."""
    return job.rpartition("/")[0] or job
