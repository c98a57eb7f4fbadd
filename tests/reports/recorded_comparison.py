"""A comparison with known results: two ways to train, strong and weak scaling, two repeats of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reports.recorded import write_run
from tutti.records.comparison import STRONG, WEAK, Combination, Comparison, ComparisonFolder
from tutti.records.run import Evaluation, RankRecord
from tutti.records.usage import RankUsage, UsageRecord
from tutti.reports import page

WAYS = (
    Combination("solo, 1 thread", "one", "solo", 1, 1, STRONG),
    Combination("sync, 2 workers", "sync", "sync", 2, 1, STRONG),
    Combination("solo, 1 thread, weak", "weak-one", "solo", 1, 1, WEAK),
    Combination("sync, 2 workers, weak", "weak-sync", "sync", 2, 1, WEAK),
)

SECONDS = (4.0, 2.5, 4.0, 2.0)
"""Of an epoch of training, by way."""

TEST = Evaluation(20, 0.4, {"accuracy": 0.8}, [[9, 1], [3, 7]])


def write_comparison(folder: Path, *ways: Combination) -> None:
    """Write it, with further combinations that have no runs."""
    for one, seconds in zip(WAYS, SECONDS, strict=True):
        stages = {"data": 0.5, "forward": 1.0, "backward": seconds - 1.75, "wait": 0.25, "validation": 1.0}
        stale = {0: 3, 1: 1} if one.workers > 1 else {}
        for repeat in range(2):
            write_run(
                ComparisonFolder(folder).run(one, repeat).path,
                [(seconds, 0.5), (seconds + repeat, 0.75)],
                validation_s=1.0,
                ranks=[RankRecord(stages=stages, staleness=stale)] * one.workers,
                test=TEST,
                labels=("cat", "dog"),
                usage=_usage(one.workers, seconds),
            )
    ComparisonFolder(folder).write(Comparison("lenet", "mnist", 2, 0.7, (*WAYS, *ways)))


def leave_pictures_out(patch: pytest.MonkeyPatch) -> None:
    """Let pages be written with empty pictures."""
    import vl_convert

    converter = SimpleNamespace(
        __version__=vl_convert.__version__,
        javascript_bundle=vl_convert.javascript_bundle,
        vegalite_to_svg=lambda spec: "<svg/>",
        svg_to_png=lambda svg, scale: b"",
    )
    patch.setattr(page, "_converter", lambda: converter)


def _usage(workers: int, seconds: float) -> list[UsageRecord]:
    """Return two samples of two cores, one core busy for each worker; memory grows by 64 MiB."""
    return [
        UsageRecord(
            time=1e9 + number * seconds,
            host="here",
            cores=[90.0 if core < workers else 5.0 for core in range(2)],
            ranks=[RankUsage(rank, (100 + 64 * number) * 2**20, 90.0, "running") for rank in range(workers)],
        )
        for number in range(2)
    ]
