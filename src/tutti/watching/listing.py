"""The runs below a folder: what each of them is, and how far it has come. Read from their records only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadRunFolder
from tutti.records.json_lines import Record
from tutti.records.run import Evaluation, ranks_in_turn
from tutti.records.run_folder import CONFIG, refuse_no_folder
from tutti.records.texts import duration, span_text
from tutti.records.untrusted import printable
from tutti.tables import TextTable
from tutti.watching.health import Condition, Limits, examine
from tutti.watching.snapshot import Snapshot, Watched

DAMAGED: Final = "damaged"
"""The state of a run whose records cannot be read."""

ACCURACIES: Final = ("test %", "validation %")
"""The columns of the accuracy on each part."""

_STYLES: Final = {Condition.RUNNING.value: "green", Condition.FAILED.value: "red", DAMAGED: "red"}


@dataclass(frozen=True)
class ListedRun(Record):
    """A run in a list.

    Attributes:
        folder: its path.
        state: a `Condition` in words, or `DAMAGED`.
        model: its name; None: unknown, as are the others then.
        data: the name of its data.
        strategy: by which it trains.
        ranks: the number of ranks that train; the last one, where it changed.
        ranks_in_turn: the numbers of ranks that it had, one after the other; empty: always the same.
        epochs: those that are complete.
        test: the metrics on the test part; empty: there are none.
        validation: those on the validation part, after the last epoch or with the final weights.
        seconds: of training, as far as it is known.
        time: of its last sign of life (UTC, ISO 8601).
        resumable: whether it has a checkpoint to go on from.
        problem: the reason why its records cannot be read.
    """

    folder: str
    state: str
    model: str | None = None
    data: str | None = None
    strategy: str | None = None
    ranks: int | None = None
    ranks_in_turn: tuple[int, ...] = ()
    epochs: int = 0
    test: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    time: str = ""
    resumable: bool = False
    problem: str | None = None


def list_runs(folder: Path, newest: int | None = None) -> list[ListedRun]:
    """Read the runs below a folder, or of the folder itself, the newest first."""
    refuse_no_folder(folder)
    if not os.access(folder, os.R_OK | os.X_OK):
        raise BadRunFolder(f"cannot look into {folder}: permission denied; give a folder of runs")
    found = sorted((path.parent for path in folder.rglob(CONFIG)), key=_touched, reverse=True)
    runs = [_listed(path) for path in found[:newest]]
    return sorted(runs, key=lambda run: run.time, reverse=True)


def _touched(folder: Path) -> float:
    """Return the time when the files of a folder were last made or replaced."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _listed(folder: Path) -> ListedRun:
    """Read a run; what cannot be read is its state."""
    try:
        snapshot = Watched(folder).read(time.time())
        if snapshot.config is None:
            raise BadRunFolder(f"{folder / CONFIG} is not what tutti wrote")
        return _described(snapshot, snapshot.config)
    except BadRunFolder as error:
        touched = datetime.fromtimestamp(_touched(folder), UTC).isoformat(timespec="seconds")
        return ListedRun(str(folder), DAMAGED, time=touched, problem=str(error))


def _described(run: Snapshot, config: dict[str, Any]) -> ListedRun:
    summary, history = run.summary, run.history
    test: Evaluation | None = None
    validation = history[-1].validation if history else None
    if summary is not None:
        test, validation, sign = summary.test, summary.validation or validation, summary.date
    else:
        moments = [run.written or 0.0, *(beat.time for beat in run.beats)]
        sign = datetime.fromtimestamp(max(moments), UTC).isoformat(timespec="seconds")
    passed = sum(record.seconds["total"] for record in history) if history else None
    return ListedRun(
        folder=str(run.folder),
        state=examine(run, Limits()).condition.value,
        model=_text(config, "model"),
        data=_text(config, "data"),
        strategy=_text(config, "strategy"),
        ranks=run.workers or None,
        ranks_in_turn=ranks_in_turn(run.starts),
        epochs=len(history),
        test={} if test is None else test.metrics,
        validation={} if validation is None else validation.metrics,
        seconds=passed if summary is None else summary.seconds,
        time=sign,
        resumable=run.resumable and summary is None,
    )


def _text(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    return value if isinstance(value, str) else None


def table_of(runs: list[ListedRun]) -> TextTable:
    """Return the table of a list of runs."""
    heads = (
        "run",
        "model",
        "data",
        "strategy",
        "ranks",
        "state",
        "epochs",
        *ACCURACIES,
        "time",
        "last sign",
    )
    table = TextTable(
        heads,
        left=("model", "data", "strategy", "state"),
        drop=("last sign", "epochs", "strategy", "ranks", "data", "model", "time"),
    )
    for run in runs:
        accuracies = (part.get("accuracy") for part in (run.test, run.validation))
        state = (
            f"{run.state}, resumable" if run.resumable and run.state == Condition.FAILED.value else run.state
        )
        table.add_row(
            run.folder,
            *(_last_part(name) for name in (run.model, run.data)),
            run.strategy or "",
            "" if run.ranks is None else span_text(run.ranks_in_turn or [run.ranks]),
            state,
            str(run.epochs),
            *("" if one is None else f"{100 * one:.2f}" for one in accuracies),
            "" if run.seconds is None else duration(run.seconds),
            _local(run.time),
            style=_STYLES.get(run.state, ""),
        )
    return table


def _last_part(name: str | None) -> str:
    """Return a name, of a file the last part of its path."""
    return "" if name is None else name.rstrip("/").rpartition("/")[2]


def _local(moment: str) -> str:
    """Return a moment by the clock on the wall; as it is where it is none."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return printable(moment)
