"""Made-up records of a run to watch."""

from __future__ import annotations

import json
from pathlib import Path

from tutti.records.heartbeat import TRAINING, Heartbeat
from tutti.records.json_lines import append_line
from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.records.run_folder import RunFolder
from tutti.records.usage import RankUsage, UsageRecord
from tutti.watching.snapshot import Snapshot

NOW = 1_700_000_000.0

CONFIG = {"model": "mlp", "data": "digits", "strategy": "hogwild", "workers": "3"}


def beat(rank: int, **other: object) -> Heartbeat:
    """Return the heartbeat of a rank that trains."""
    values: dict[str, object] = {
        "rank": rank,
        "host": "a",
        "process": 1000 + rank,
        "time": NOW - 0.5,
        "state": TRAINING,
        "began": NOW - 100.0,
        "moved": NOW - 0.75,
        "epoch": 2,
        "step": 1000,
        "updates": 2000,
        "per_epoch": 500,
        "steps_per_s": 10.0,
        "samples_per_s": 320.0,
    }
    return Heartbeat(**{**values, **other})  # type: ignore[arg-type]


def usage(*states: str, age: float = 0.25) -> UsageRecord:
    """Return a sample of host a, with the states of ranks 0, 1, ..."""
    ranks = [RankUsage(rank, 100 << 20, 98.0, state) for rank, state in enumerate(states)]
    return UsageRecord(NOW - age, "a", [98.0] * len(states), ranks)


def seen(*beats: Heartbeat, usage: tuple[UsageRecord, ...] = (), **other: object) -> Snapshot:
    """Return the snapshot of a run with these heartbeats."""
    values: dict[str, object] = {"config": {**CONFIG, "workers": str(len(beats))}, "written": NOW - 1.0}
    return Snapshot(Path("run"), NOW, beats=beats, usage=usage, **{**values, **other})  # type: ignore[arg-type]


def epoch(number: int) -> EpochRecord:
    """Return the record of an epoch."""
    times = {"validation": 0.5, "total": 2.5}
    train, found = (Evaluation(1000, 0.5 / number, {"accuracy": 0.75}) for _ in range(2))
    ranks = [RankRecord(updates=500, samples=500)] * 2
    return EpochRecord(number, 500 * number, True, train, found, times, 500.0, 0.1, "now", ranks)


def summary(epochs: int) -> Summary:
    """Return the summary of a finished run."""
    history = [epoch(number) for number in range(1, epochs + 1)]
    return Summary.of(history, Evaluation(100, 0.25, {"accuracy": 0.875}), 10, World(2, 1, 1))


def write_run(
    folder: Path, *beats: Heartbeat, epochs: int = 0, finished: bool = False, usage: UsageRecord | None = None
) -> Path:
    """Write the folder of a run."""
    (folder / "ranks").mkdir(parents=True)
    config = {**CONFIG, "workers": str(max(1, len(beats)))}
    (folder / "config.json").write_text(json.dumps(config))
    for one in beats:
        RunFolder(folder).write_heartbeat(one)
    for number in range(1, epochs + 1):
        RunFolder(folder).append(epoch(number))
    if usage is not None:
        append_line(RunFolder(folder).usage_file(), usage)
    if finished:
        RunFolder(folder).write(summary(epochs))
    return folder
