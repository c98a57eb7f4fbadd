"""The points of a run within its epochs: how many there are, and what a run that goes on keeps of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import DiskFull
from tutti.records.run import Evaluation, PointRecord
from tutti.records.run_folder import RunFolder
from tutti.records.texts import RunLength
from tutti.training.points import EVERY_S, MANY, Points
from tutti.training.progress import Moment


def moment(step: int, samples: int = 10) -> Moment:
    return Moment(1, step, Evaluation(samples, 0.5, {"accuracy": 0.25}), 100.0, seconds=2.0 * step)


def test_a_point_is_what_the_rank_has_seen_of_the_epoch(tmp_path: Path) -> None:
    Points(RunFolder(tmp_path)).moment(moment(3))
    ((point,), damage) = RunFolder(tmp_path).points().records, RunFolder(tmp_path).points().damage
    assert (point.epoch, point.step, point.seconds, point.train.metrics) == (1, 3, 6.0, {"accuracy": 0.25})
    assert damage == []


def test_a_run_that_goes_on_takes_the_points_after_its_checkpoint_back(tmp_path: Path) -> None:
    before = Points(RunFolder(tmp_path))
    for step in (1, 2, 3, 4):
        before.moment(moment(step))
    Points(RunFolder(tmp_path)).begin(RunLength(10, 10), step=2)
    assert [point.step for point in RunFolder(tmp_path).points().records] == [1, 2]


def test_there_are_fewer_points_the_longer_a_run_is_also_when_it_goes_on(tmp_path: Path) -> None:
    points = Points(RunFolder(tmp_path))
    assert points.every_s == EVERY_S
    for step in range(1, MANY + 1):
        points.moment(moment(step))
    assert points.every_s == 2 * EVERY_S
    again = Points(RunFolder(tmp_path))
    again.begin(RunLength(1000, 10), step=MANY)
    assert again.every_s == 2 * EVERY_S


def test_a_rank_without_a_sample_yet_leaves_no_point(tmp_path: Path) -> None:
    Points(RunFolder(tmp_path)).moment(moment(1, samples=0))
    assert RunFolder(tmp_path).points().records == []


def test_a_full_disk_costs_the_points_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: RunFolder, point: PointRecord) -> None:
        raise DiskFull("cannot write points.jsonl: No space left on device")

    points = Points(RunFolder(tmp_path))
    monkeypatch.setattr(RunFolder, "append_point", full)
    points.moment(moment(1))
    points.moment(moment(2))
    assert capsys.readouterr().err.count("No space left on device; the curves have no more points") == 1
