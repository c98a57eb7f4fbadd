"""Run folders with known times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.records.json_lines import append_line, to_json
from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World, now
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.records.usage import UsageRecord

SAMPLES = 1000
"""Of an epoch."""


def write_run(
    path: Path,
    epochs: Sequence[tuple[float, float | None]],
    *,
    validation_s: float = 5.0,  # of each validation
    ranks: Sequence[RankRecord] = (),  # of every epoch
    test: Evaluation | None = None,
    finished: bool = True,
    config: Mapping[str, object] | None = None,
    labels: Sequence[str] | None = None,
    usage: Sequence[UsageRecord] = (),
    last_steps: int = 10,  # of the last epoch; with less than 10 it is a part of an epoch
) -> None:
    """Write the folder of a run, whose epochs have seconds and a validation accuracy."""
    path.mkdir(parents=True)
    history = []
    for number, (seconds, accuracy) in enumerate(epochs, start=1):
        steps = last_steps if number == len(epochs) else 10
        history.append(
            EpochRecord(
                epoch=number,
                step=10 * (number - 1) + steps,
                complete=steps == 10,
                train=Evaluation(SAMPLES * steps // 10, 0.5, {"accuracy": 0.25}),
                validation=None
                if accuracy is None
                else Evaluation(100, 1 - accuracy, {"accuracy": accuracy}),
                seconds={"validation": validation_s, "total": seconds + validation_s},
                samples_per_s=SAMPLES / seconds,
                lr=0.1,
                time=now(),
                ranks=list(ranks),
            )
        )
        RunFolder(path).append(history[-1])
    for sample in usage:
        append_line(RunFolder(path).usage_file(), sample)
    if config is not None:
        (path / "config.json").write_text(to_json(config))
    if labels is not None:
        RunFolder(path).write(TrainedOn("digits", len(labels), tuple(labels), (64,), (), ()))
    if finished:
        summary = Summary.of(history, test, 7, World())
        RunFolder(path).write(summary)
