"""The table of a comparison: time, speed-up and efficiency of each combination.

    speed-up    seconds of the baseline / seconds
    efficiency  speed-up over one process with one thread / cores

Both are computed from the seconds in the table. They are blank if a repeat of the combination or of the
baseline is missing, or if the number of ranks changed during a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tutti.records.comparison import CPU, Combination, Comparison
from tutti.reports.runs import Run

DIGITS = 2
"""Decimals of the seconds in tables."""


@dataclass(frozen=True)
class Row:
    """The results of a combination."""

    combination: Combination
    seconds: float | None  # of training, without validation: the median of the repeats, rounded
    spread: tuple[float, float] | None  # the shortest and the longest
    finished: int  # the number of finished repeats
    samples_per_s: float | None  # the median
    speed_up: float | None  # over one process with one thread
    speed_up_all: float | None  # over one process with all threads
    efficiency: float | None  # None for a GPU
    accuracy: float | None  # the mean over the repeats, in [0, 1]
    metrics: Mapping[str, float]  # the means of other metrics
    to_target: float | None  # seconds to the goal, the median; None: some repeat did not reach it
    error: str | None  # of the first repeat that failed
    cores_in_turn: Sequence[int] = ()  # the numbers of cores, if the number of ranks changed


def rows(
    comparison: Comparison, runs: Mapping[str, Sequence[Run]], errors: Mapping[str, str], part: str
) -> list[Row]:
    """Return a row for each combination; metrics are those on this `part` of the data."""
    whole = {name: _seconds(found, comparison.repeats) for name, found in runs.items()}
    found = []
    for one in comparison.combinations:
        baselines = [other for other in comparison.combinations if is_baseline(other, one)]
        few = min(baselines, key=lambda other: other.threads, default=None)
        many = max(baselines, key=lambda other: other.threads, default=None)
        one_thread_s = whole[few.folder] if few is not None and few.threads == 1 else None
        all_threads_s = whole[many.folder] if many is not None and many is not few else None
        some = runs[one.folder]
        seconds = [run.seconds for run in some]
        speed_up = _ratio(one_thread_s, whole[one.folder])
        metrics = _means([run.metrics_on(part) for run in some])
        reached = [] if comparison.goal is None else [run.seconds_to(comparison.goal) for run in some]
        times = [s for s in reached if s is not None]
        row = Row(
            combination=one,
            seconds=round(median(seconds), DIGITS) if seconds else None,
            spread=(round(min(seconds), DIGITS), round(max(seconds), DIGITS)) if seconds else None,
            finished=sum(run.finished for run in some),
            samples_per_s=median(run.samples_per_s for run in some) if some else None,
            speed_up=speed_up,
            speed_up_all=_ratio(all_threads_s, whole[one.folder]),
            efficiency=speed_up / one.cores if speed_up is not None and one.device == CPU else None,
            accuracy=metrics.pop("accuracy", None),
            metrics=metrics,
            to_target=round(median(times), DIGITS) if times and len(times) == comparison.repeats else None,
            error=errors.get(one.folder),
            cores_in_turn=[cores for run in some for cores in run.cores_in_turn],
        )
        found.append(row)
    return found


def _means(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the repeats that have it."""
    names = dict.fromkeys(name for found in repeats for name in found)
    return {name: mean(found[name] for found in repeats if name in found) for name in names}


def is_baseline(other: Combination, one: Combination) -> bool:
    """Return whether `other` is a baseline of `one`: solo on the CPU with the same swept options."""
    alone = other.strategy == "solo" and other.workers == 1 and other.device == CPU
    return alone and other.scaling == one.scaling and other.sweep == one.sweep


def _seconds(runs: Sequence[Run], repeats: int) -> float | None:
    """Return the median seconds of a combination; None if a repeat is missing or its cores changed."""
    whole = len(runs) == repeats and all(run.finished and not run.cores_in_turn for run in runs)
    return round(median(run.seconds for run in runs), DIGITS) if whole else None


def _ratio(of: float | None, to: float | None) -> float | None:
    return of / to if of is not None and to is not None and to > 0 else None
