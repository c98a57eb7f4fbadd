"""The display of a run until it ends: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tutti.records.comparison import FILE as COMPARISON
from tutti.records.farm_folder import FARM
from tutti.records.heartbeat import Heartbeat
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.texts import RunLength, duration, epoch_text, figures, metric_text, resumed_text
from tutti.records.untrusted import printable
from tutti.tables import TextTable, progress_bar
from tutti.terminal import console_on
from tutti.watching.health import Condition, Health, Limits, examine
from tutti.watching.snapshot import MARKS, Snapshot, Watched

EPOCHS: Final = 8
"""The number of epochs that are shown, the last ones."""

SETTLED_S: Final = 5.0
"""The seconds of training since the last start from which on they tell how long the rest will take."""

_STYLES: Final = {
    Condition.RUNNING: "green",
    Condition.FINISHED: "green",
    Condition.STOPPED: "yellow",
    Condition.FAILED: "bold red",
}


def screen(run: Snapshot, health: Health) -> RenderableType:
    """Return all that is shown of a run."""
    parts: list[RenderableType] = [Text(headline(run, health), style=_STYLES.get(health.condition, ""))]
    front = _front(run)
    if front is not None and health.condition is Condition.RUNNING:
        span = _length(front)
        parts.append(progress_bar(total=span.updates, completed=span.place(front.step)))
    if run.history:
        parts.append(_epochs(run.history[-EPOCHS:]))
    if run.beats and health.condition not in (Condition.FINISHED, Condition.STOPPED):
        parts.append(_ranks(run))
    parts += [Text(text, style="red" if bad else "yellow") for bad, text in remarks(run, health)]
    return Group(*parts)


def headline(run: Snapshot, health: Health) -> str:
    """Describe the run and its condition in one line."""
    config, front = run.config or {}, _front(run)
    what = f"{printable(str(run.folder))}: "
    if config:
        what += f"{config.get('model')} on {config.get('data')}, {config.get('strategy')}, "
        what += f"{run.workers} rank{'' if run.workers == 1 else 's'}, "
    text = what + health.condition.value
    if run.summary is not None:
        text += f" after {duration(run.summary.seconds)}"
        return text + (f", test {figures(run.summary.test)}" if run.summary.test else "")
    if front is None:
        return text
    span = _length(front)
    begun = 0 if run.start is None else run.start.step
    text += f", epoch {front.epoch}/{span.epochs}" if span.updates >= span.per_epoch else ""
    text += f", step {front.step:,} of {front.updates:,}"
    if health.condition is Condition.RUNNING and front.began is not None:
        made = front.step - begun
        if made > 0 and front.time - front.began >= SETTLED_S:
            left_s = (front.time - front.began) / made * (front.updates - front.step)
            text += f", {duration(left_s)} left"
    return text + (f", {resumed_text(run.start)}" if run.start is not None and begun else "")


def _length(front: Heartbeat) -> RunLength:
    return RunLength(front.updates - front.counted, front.per_epoch, front.counted)


def remarks(run: Snapshot, health: Health) -> Iterator[tuple[bool, str]]:
    """Yield what is wrong, each with whether it is bad."""
    yield from ((found.lost, str(found)) for found in health.findings)
    if health.condition in (Condition.FAILED, Condition.STOPPED) and run.resumable:
        yield False, f"go on with it by: tutti train --resume {shlex.quote(str(run.folder))}"
    if health.condition is Condition.FAILED:
        epochs = len(run.history)
        ended = f"after {epochs} complete epoch{'' if epochs == 1 else 's'}"
        at = ended if epochs else "before its first epoch ended"
        yield True, f"the run failed {at}: it has no summary, and its ranks cannot go on; see what it printed"
    yield from ((False, printable(sentence)) for sentence in run.damage)


def _front(run: Snapshot) -> Heartbeat | None:
    """Return the heartbeat that the run's progress is taken from: of the first rank that trains."""
    return next((beat for beat in run.beats if beat.updates), None)


def _epochs(records: tuple[EpochRecord, ...]) -> TextTable:
    names = list(records[-1].train.metrics)
    validated = any(record.validation for record in records)
    heads = ["loss", *names]
    heads += [f"validation {head}" for head in heads] if validated else []
    table = TextTable(
        ["epoch", *heads, "samples/s", "seconds"], drop=("seconds", "samples/s", *reversed(heads[1:]))
    )
    for record in records:
        cells = [str(record.epoch), *_figures(record.train, names)]
        cells += _figures(record.validation, names) if validated else []
        table.add_row(*cells, f"{record.samples_per_s:,.0f}", f"{record.seconds['total']:.2f}")
    return table


def _figures(evaluation: Evaluation | None, names: list[str]) -> list[str]:
    if evaluation is None:
        return [""] * (len(names) + 1)
    found = evaluation.metrics
    return [
        f"{evaluation.loss:.4f}",
        *(metric_text(name, found[name]) if name in found else "" for name in names),
    ]


def _ranks(run: Snapshot) -> TextTable:
    heads = ("rank", "host", "process", "state", "step", "samples/s", "CPU", "memory", "last sign")
    table = TextTable(heads, left=("host", "state"), drop=("process", "host", "memory", "CPU", "samples/s"))
    for beat in run.beats:
        table.add_row(str(beat.rank), beat.host, str(beat.process), *_cells(run, beat))
    return table


def _cells(run: Snapshot, beat: Heartbeat) -> list[str]:
    """Return state, step, samples per second, CPU, memory, age of the last heartbeat."""
    sample = run.usage_of(beat.rank)
    cpu = "" if sample is None else f"{sample[0].cpu:.0f} %"
    pss = None if sample is None else sample[0].pss
    memory = "" if pss is None else f"{pss / (1 << 20):,.0f} MiB"
    age = f"{max(0.0, run.now - beat.time):.1f} s"
    return [beat.doing, f"{beat.step:,}", f"{beat.samples_per_s:,.0f}", cpu, memory, age]


REFRESH_S: Final = 1.0
"""Seconds between two readings of the records."""


@dataclass
class Clock:
    """The clock of the display, which tests replace."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def show(folder: Path, limits: Limits, stream: IO[str]) -> bool:
    """Show the condition of a run once; return whether all is well."""
    watched = Watched(folder)
    watched.check()
    run = watched.read(time.time())
    health = examine(run, limits)
    console_on(stream).print(screen(run, health))
    return health.well


def wait_for(folder: Path, stream: IO[str], clock: Clock | None = None) -> None:
    """Wait, if a folder does not exist, until a run, a farm or a comparison has begun in it."""
    clock = clock or Clock()
    if not folder.exists():
        print(f"{printable(str(folder))} does not exist yet: waiting for it", file=stream, flush=True)
        while not any((folder / name).exists() for name in (*MARKS, FARM, COMPARISON)):
            clock.sleep(REFRESH_S)


def follow(folder: Path, limits: Limits, stream: IO[str], clock: Clock | None = None) -> bool:
    """Show a run, which may have no records yet, until it ends; return whether it has finished."""
    clock, watched = clock or Clock(), Watched(folder)
    watched.check()
    if not stream.isatty():
        return _follow(watched, limits, clock, Printer(stream).tell)
    # No extra thread refreshes the screen: it changes only when the records are read.
    with Live(console=console_on(stream), auto_refresh=False, vertical_overflow="visible") as live:
        return _follow(
            watched, limits, clock, lambda run, health: live.update(screen(run, health), refresh=True)
        )


def _follow(watched: Watched, limits: Limits, clock: Clock, tell: Callable[[Snapshot, Health], None]) -> bool:
    while True:
        run = watched.read(clock.now())
        health = examine(run, limits)
        tell(run, health)
        if health.condition not in (Condition.WAITING, Condition.RUNNING):
            return health.condition is Condition.FINISHED
        clock.sleep(REFRESH_S)


class Printer:
    """The display of a run as lines: each time those that are new."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._epochs, self._said = 0, ""
        self._starts: int | None = None
        self._remarks: set[str] = set()

    def tell(self, run: Snapshot, health: Health) -> None:
        """Print new starts, epochs and troubles."""
        if health.condition.value != self._said:
            self._said = health.condition.value
            self._print(headline(run, health))
        # Where the run went on since the last look, and how its number of ranks changed there.
        told = len(run.starts) if self._starts is None else self._starts
        for before, start in pairwise(run.starts[max(0, told - 1) :]):
            self._print(printable(resumed_text(start, before)))
        self._starts = len(run.starts)
        front = _front(run)
        span = None if front is None else _length(front)
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

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _kind(text: str) -> str:
    """Return a remark without its numbers, which change from one reading to the next."""
    return "".join("0" if letter.isdigit() else letter for letter in text)
