"""The table of a comparison, from known records."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.reports.recorded import write_run
from tutti.errors import BadRunFolder
from tutti.records.comparison import STRONG, Combination, Comparison, ComparisonFolder
from tutti.records.run import Evaluation
from tutti.reports.results import Results, read_comparison
from tutti.reports.runs import Run
from tutti.reports.scaling import Row
from tutti.reports.text import show, verdict

ONE = Combination("solo, 1 thread", "one", "solo", 1, 1, STRONG)
ALL = Combination("solo, 2 threads", "all", "solo", 1, 2, STRONG)
TEST = Evaluation(100, 0.5, {"accuracy": 0.7})
SYNC = Combination("sync, 2 workers", "sync", "sync", 2, 1, STRONG)


def comparison(*combinations: Combination, repeats: int = 2, goal: float | None = None) -> Comparison:
    return Comparison("mlp", "digits", repeats, goal, combinations)


def table(folder: Path, asked: Comparison) -> dict[str, Row]:
    return {row.combination.folder: row for row in results(folder, asked).rows}


def results(folder: Path, asked: Comparison) -> Results:
    ComparisonFolder(folder).write(asked)
    return read_comparison(folder)


def write_all(folder: Path) -> None:
    for one, times in ((ONE, (10.0, 12.0)), (ALL, (8.0, 8.5)), (SYNC, (5.0, 6.0))):
        for repeat, seconds in enumerate(times):
            write_run(
                ComparisonFolder(folder).run(one, repeat).path,
                [(seconds / 2, 0.6), (seconds / 2, 0.8)],
                test=TEST,
            )


def test_every_figure_is_computed_from_the_records(tmp_path: Path) -> None:
    write_all(tmp_path)
    found = table(tmp_path, comparison(ONE, ALL, SYNC, goal=0.7))
    row = found["sync"]
    assert (row.seconds, row.spread, row.finished) == (5.5, (5.0, 6.0), 2)
    assert row.samples_per_s == pytest.approx((2000 / 5 + 2000 / 6) / 2)
    assert row.speed_up == pytest.approx(11.0 / 5.5)
    assert row.speed_up_all == pytest.approx(8.25 / 5.5)
    assert row.efficiency == pytest.approx(11.0 / 5.5 / 2)
    assert row.accuracy == pytest.approx(0.7)
    assert row.to_target == pytest.approx(5.5 * 0.75, abs=0.005)
    assert row.error is None
    assert found["one"].speed_up == found["one"].efficiency == 1.0
    assert found["all"].speed_up == pytest.approx(11.0 / 8.25)
    assert found["all"].efficiency == pytest.approx(11.0 / 8.25 / 2)


def test_the_speed_up_is_computed_from_the_rounded_seconds(tmp_path: Path) -> None:
    for one, seconds in ((ONE, 1.004), (SYNC, 0.3349)):
        write_run(ComparisonFolder(tmp_path).run(one, 0).path, [(seconds, 0.5)])
    row = table(tmp_path, comparison(ONE, SYNC, repeats=1))["sync"]
    assert row.seconds == 0.33
    assert row.speed_up == 1.0 / 0.33


@pytest.mark.parametrize("lacks", ["one", "sync"])
def test_a_missing_repeat_leaves_the_speed_up_blank(tmp_path: Path, lacks: str) -> None:
    write_all(tmp_path)
    (tmp_path / lacks / "1" / "summary.json").unlink()
    found = table(tmp_path, comparison(ONE, ALL, SYNC))
    assert found["sync"].speed_up is found["sync"].efficiency is None
    assert found[lacks].finished == 1
    assert found[lacks].seconds is not None
    assert (found["all"].speed_up is None) == (lacks == "one")
    assert (found["sync"].speed_up_all is None) == (lacks == "sync")


def test_each_value_of_a_swept_option_has_baselines(tmp_path: Path) -> None:
    asked = []
    for batch, alone, together in ((32, 8.0, 4.0), (64, 6.0, 2.0)):
        for name, seconds, workers in (("solo", alone, 1), ("sync", together, 2)):
            sweep = {"batch_size": batch}
            one = Combination(name, f"{name}-{batch}", name, workers, 1, STRONG, sweep, sweep)
            write_run(ComparisonFolder(tmp_path).run(one, 0).path, [(seconds, 0.5)])
            asked.append(one)
    found = table(tmp_path, comparison(*asked, repeats=1))
    assert found["sync-32"].speed_up == 2.0
    assert found["sync-64"].speed_up == 3.0


def test_a_failed_combination_is_shown_with_its_error(tmp_path: Path) -> None:
    write_all(tmp_path)
    bad = Combination("easgd, 2 workers", "easgd", "easgd", 2, 1, STRONG)
    ComparisonFolder(tmp_path).run(bad, 0).write_error("rank 1 failed:\nValueError: broken")
    asked = comparison(ONE, ALL, SYNC, bad)
    found = results(tmp_path, asked).rows
    assert found[-1].error == "rank 1 failed:\nValueError: broken"
    assert found[-1].seconds is found[-1].accuracy is None
    stream = io.StringIO()
    show(results(tmp_path, asked), stream)
    shown = stream.getvalue()
    assert "easgd, 2 workers failed: ValueError: broken" in shown
    assert "easgd, 2 workers (0 of 2 runs)" in shown


@pytest.mark.parametrize(
    ("alone", "together", "said"),
    [
        (
            8.0,
            5.0,
            "fastest: sync, 2 workers, 1.60 times as fast as one process with one thread; its efficiency",
        ),
        (5.0, 8.0, "fastest: solo, 1 thread; nothing is faster than one process with one thread here"),
    ],
)
def test_the_fastest_way_is_named(tmp_path: Path, alone: float, together: float, said: str) -> None:
    for one, seconds in ((ONE, alone), (SYNC, together)):
        write_run(ComparisonFolder(tmp_path).run(one, 0).path, [(seconds, 0.5)])
    assert (verdict(results(tmp_path, comparison(ONE, SYNC, repeats=1))) or "").startswith(said)


def test_ways_with_overlapping_seconds_are_a_tie(tmp_path: Path) -> None:
    for one, times in ((ONE, (8.0, 9.0)), (SYNC, (2.0, 4.0)), (ALL, (3.9, 5.0))):
        for repeat, seconds in enumerate(times):
            write_run(ComparisonFolder(tmp_path).run(one, repeat).path, [(seconds, 0.5)])
    said = verdict(results(tmp_path, comparison(ONE, SYNC, ALL)))
    assert said is not None
    assert said.startswith("shortest median: sync, 2 workers")
    assert said.partition("A tie")[2].endswith(f": {ALL.name}")


def test_a_gpu_has_no_efficiency(tmp_path: Path) -> None:
    cuda = Combination("solo, cuda", "cuda", "solo", 1, 2, STRONG, device="cuda")
    for one, seconds in ((ONE, 8.0), (cuda, 0.5)):
        write_run(ComparisonFolder(tmp_path).run(one, 0).path, [(seconds, 0.5)])
    found = table(tmp_path, comparison(ONE, cuda, repeats=1))
    assert (found["cuda"].speed_up, found["cuda"].efficiency) == (16.0, None)
    assert found["one"].speed_up_all is None


@pytest.mark.parametrize(("target", "expected"), [(0.25, 1.0), (0.5, 2.0), (0.6, 4.4), (1.0, 6.0)])
def test_the_time_to_a_goal_is_interpolated(tmp_path: Path, target: float, expected: float) -> None:
    write_run(tmp_path / "run", [(2.0, 0.5), (2.0, 0.5), (2.0, 1.0)])
    assert Run.read(tmp_path / "run").seconds_to(target) == pytest.approx(expected)


def test_a_run_in_its_first_epoch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadRunFolder, match="nothing to report yet; train it again"):
        Run.read(tmp_path)
