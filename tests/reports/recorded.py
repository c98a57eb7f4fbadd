"""Run folders with known times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.json_lines import append_line, to_json
from tutti.records import EpochRecord, Evaluation, RankRecord, Summary, World, now

SAMPLES = 1000
"""Of an epoch."""


def write_run(
    path: Path,
    epochs: Sequence[tuple[float, float]],
    *,
    validation_s: float = 5.0,
    stages: Sequence[Mapping[str, float]] = (),
    test: Evaluation | None = None,
    finished: bool = True,
) -> None:
    """Write the folder of a run.

    Args:
        path: the folder.
        epochs: of each the seconds of training, and the accuracy on the validation part after it.
        validation_s: seconds of each validation.
        stages: seconds by stage of each epoch; one for each rank.
        test: on the test part.
        finished: whether the run has come to its end.
    """
    path.mkdir(parents=True)
    history = []
    for number, (seconds, accuracy) in enumerate(epochs, start=1):
        history.append(
            EpochRecord(
                epoch=number,
                step=10 * number,
                complete=True,
                train=Evaluation(SAMPLES, 0.5),
                validation=Evaluation(100, 1.0 - accuracy, {"accuracy": accuracy}),
                seconds={"validation": validation_s, "total": seconds + validation_s},
                samples_per_s=SAMPLES / seconds,
                lr=0.1,
                time=now(),
                ranks=[RankRecord(stages=dict(one)) for one in stages],
            )
        )
        append_line(path / "history.jsonl", history[-1])
    if finished:
        summary = Summary.of(history, test, 7, World())
        (path / "summary.json").write_text(to_json(summary.as_json()))
