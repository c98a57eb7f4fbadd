"""The display of a run until it ends: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tutti.records.farm_folder import FARM
from tutti.records.heartbeat import Heartbeat
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.texts import (
    RunLength,
    duration,
    epoch_text,
    figures,
    loss_text,
    metric_text,
    plural,
    printable,
    resumed_text,
)
from tutti.tables import TextTable, progress_bar
from tutti.terminal import console_on
from tutti.watching.health import Condition, Health, examine
from tutti.watching.snapshot import MARKS, Snapshot, Watched

EPOCHS: Final = 8
"""The number of last epochs that are shown."""

SETTLED_S: Final = 5.0
"""The seconds of training after which the remaining time is estimated."""

REFRESH_S: Final = 1.0
"""The seconds between two readings of the records."""

_STYLES: Final = {
    Condition.RUNNING: "green",
    Condition.FINISHED: "green",
    Condition.STOPPED: "yellow",
    Condition.FAILED: "bold red",
}


def screen(run: Snapshot, health: Health) -> RenderableType:
    """Return the display of a run on a terminal."""
    parts: list[RenderableType] = [Text(headline(run, health), style=_STYLES.get(health.condition, ""))]
    front = _front(run)
    if front is not None and health.condition is Condition.RUNNING:
        span = _length(front)
        parts.append(progress_bar(total=span.updates, completed=span.place(front.step)))
    if run.history:
        parts.append(_epochs(run.history[-EPOCHS:]))
    if run.beats and health.condition not in (Condition.FINISHED, Condition.STOPPED):
        parts.append(_ranks(run, health))
    parts += [Text(text, style="red" if bad else "yellow") for bad, text in remarks(run, health)]
    return Group(*parts)


def headline(run: Snapshot, health: Health) -> str:
    """Return a description of the run and its condition in one line."""
    config, front = run.config or {}, _front(run)
    text = f"{printable(str(run.folder))}: "
    if config:
        text += f"{config.get('model')} on {config.get('data')}, {config.get('strategy')}, "
        text += f"{plural(run.workers, 'rank')}, "
    text += health.condition.value
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


def remarks(run: Snapshot, health: Health) -> Iterator[tuple[bool, str]]:
    """Yield sentences about the run, each with whether it is bad news."""
    yield from ((found.lost, str(found)) for found in health.findings)
    yield from ((False, printable(start.lr_why)) for start in run.starts if start.lr_why)
    if health.condition in (Condition.FAILED, Condition.STOPPED) and run.resumable:
        yield False, f"continue it by: tutti train --resume {shlex.quote(str(run.folder))}"
    if health.condition is Condition.FAILED:
        ended = f"after {plural(len(run.history), 'complete epoch')}"
        at = ended if run.history else "before its first epoch ended"
        yield True, f"the run failed {at}: it has no summary, and its ranks have ended; see its output"
    yield from ((False, printable(sentence)) for sentence in run.damage)


def _front(run: Snapshot) -> Heartbeat | None:
    """Return the heartbeat of the first rank that trains; it has the progress of the run."""
    return next((beat for beat in run.beats if beat.updates), None)


def _length(front: Heartbeat) -> RunLength:
    return RunLength(front.updates - front.counted, front.per_epoch, front.counted)


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
    metrics = evaluation.metrics
    cells = [metric_text(name, metrics[name]) if name in metrics else "" for name in names]
    return [loss_text(evaluation.loss), *cells]


def _ranks(run: Snapshot, health: Health) -> TextTable:
    heads = ("rank", "host", "process", "state", "step", "samples/s", "CPU", "memory", "last sign")
    table = TextTable(heads, left=("host", "state"), drop=("process", "host", "memory", "CPU", "samples/s"))
    states = {one.rank: one.state for one in health.findings if one.state}
    for beat in run.beats:
        sample = run.usage_of(beat.rank)
        pss = None if sample is None else sample[0].pss
        table.add_row(
            str(beat.rank),
            beat.host,
            str(beat.process),
            states.get(beat.rank, beat.doing),
            f"{beat.step:,}",
            f"{beat.samples_per_s:,.0f}",
            "" if sample is None else f"{sample[0].cpu:.0f} %",
            "" if pss is None else f"{pss / (1 << 20):,.0f} MiB",
            f"{max(0.0, run.now - beat.time):.1f} s",
        )
    return table


@dataclass
class Clock:
    """The clock of the display, which tests replace."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def show(folder: Path, silent_s: float, stream: IO[str]) -> bool:
    """Show the condition of a run once; return whether all is well."""
    watched = Watched(folder)
    watched.check()
    run = watched.read(time.time())
    health = examine(run, silent_s)
    console_on(stream).print(screen(run, health))
    return health.well


def wait_for(folder: Path, stream: IO[str], clock: Clock | None = None) -> None:
    """Wait until a folder exists, and a run or a farm begins in it."""
    clock = clock or Clock()
    if not folder.exists():
        print(f"{printable(str(folder))} does not exist yet: waiting for it", file=stream, flush=True)
        while not any((folder / name).exists() for name in (*MARKS, FARM)):
            clock.sleep(REFRESH_S)


def follow(folder: Path, silent_s: float, stream: IO[str], clock: Clock | None = None) -> bool:
    """Show a run until it ends; return whether it has finished."""
    clock, watched = clock or Clock(), Watched(folder)
    watched.check()
    if not stream.isatty():
        return _follow(watched, silent_s, clock, NewLines(stream).show)

    def update(run: Snapshot, health: Health) -> None:
        live.update(screen(run, health), refresh=True)

    # No thread refreshes the screen: it changes only when the records are read.
    with Live(console=console_on(stream), auto_refresh=False, vertical_overflow="visible") as live:
        return _follow(watched, silent_s, clock, update)


def _follow(
    watched: Watched, silent_s: float, clock: Clock, display: Callable[[Snapshot, Health], None]
) -> bool:
    while True:
        run = watched.read(clock.now())
        health = examine(run, silent_s)
        display(run, health)
        if health.condition not in (Condition.WAITING, Condition.RUNNING):
            return health.condition is Condition.FINISHED
        clock.sleep(REFRESH_S)


class NewLines:
    """The display of a run as lines: each reading adds what is new."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._epochs = stream, 0
        self._condition: Condition | None = None
        self._remarks: set[str] = set()

    def show(self, run: Snapshot, health: Health) -> None:
        """Print the condition if it has changed, and new epochs and remarks."""
        lines = [] if health.condition is self._condition else [headline(run, health)]
        self._condition, front = health.condition, _front(run)
        for record in run.history[self._epochs :]:
            label = f"epoch {record.epoch}" if front is None else _length(front).label(record.epoch)
            lines.append(f"{label}  {epoch_text(record)}")
        self._epochs = len(run.history)
        # Remarks that differ only in numbers are the same.
        shown = {re.sub(r"\d", "0", text): text for _, text in remarks(run, health)}
        lines += [text for kind, text in shown.items() if kind not in self._remarks]
        self._remarks = set(shown)
        for line in lines:
            print(line, file=self._stream, flush=True)
