"""Records: to JSON and back, and a history that survives being cut off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.records.json_lines import append_line, decode, read_lines, to_json
from tutti.records.run import (
    EpochRecord,
    Evaluation,
    RankRecord,
    RunStart,
    Summary,
    World,
    ranks_in_turn,
)

TRAIN = Evaluation(samples=1000, loss=0.25, metrics={"accuracy": 0.9})
VALIDATION = Evaluation(
    samples=6, loss=0.5, metrics={"accuracy": 0.5}, confusion=[[2, 1, 0], [1, 2, 0], [0, 0, 0]]
)
RECORD = EpochRecord(
    epoch=1,
    step=8,
    complete=True,
    train=TRAIN,
    validation=VALIDATION,
    seconds={"validation": 0.5, "total": 2.5},
    samples_per_s=500.0,
    lr=0.001,
    time="2026-01-02T03:04:05+00:00",
    ranks=[
        RankRecord(updates=8, samples=500, stages={"forward": 0.25, "backward": 0.5, "wait": 0.125}),
        RankRecord(updates=8, staleness={0: 98, 1: 1, 64: 1}, age_s_mean=0.5),
    ],
)


def test_class_accuracy_is_each_rows_share_on_the_diagonal() -> None:
    assert VALIDATION.class_accuracy() == [2 / 3, 2 / 3, None]
    assert TRAIN.class_accuracy() == []


@pytest.mark.parametrize("record", [RECORD, replace(RECORD, validation=None, complete=False)])
def test_a_record_survives_json(record: EpochRecord) -> None:
    assert decode(EpochRecord, json.loads(to_json(record))) == record


def test_the_staleness_of_a_rank_is_summed_up_by_mean_percentile_and_maximum() -> None:
    assert (RECORD.ranks[1].staleness_mean, RECORD.ranks[1].staleness_max) == (0.65, 64)
    assert RECORD.ranks[1].staleness_p99 == 64
    assert RankRecord(staleness={0: 99, 3: 1}).staleness_p99 == 3
    assert RankRecord(staleness={0: 1990, 3: 10}).staleness_p99 == 0
    assert RankRecord().staleness_mean is RankRecord().staleness_p99 is RankRecord().staleness_max is None


def test_a_summary_adds_up_the_history() -> None:
    summary = Summary.of([RECORD, replace(RECORD, epoch=2, step=16)], None, 10, World(2, 1, 1))
    assert (summary.epochs, summary.steps, summary.samples, summary.seconds) == (2, 16, 2000, 5.0)
    assert summary.samples_per_s == 2000 / 4.0
    assert summary.validation == VALIDATION
    assert set(summary.versions) == {"tutti", "torch", "python"}


@pytest.mark.parametrize(
    ("starts", "ranks"),
    [
        ([], ()),
        ([(0, 2), (10, 2)], ()),
        ([(0, 1), (10, 2), (20, 2), (30, 4), (40, 1)], (1, 2, 4, 1)),
        ([(0, 1), (20, 4), (20, 1)], ()),
        ([(0, 1), (10, 2), (30, 4), (5, 3)], (1, 3)),
    ],
)
def test_numbers_of_ranks_in_turn_are_those_that_steps_of_the_run_are_of(
    starts: list[tuple[int, int]], ranks: tuple[int, ...]
) -> None:
    assert ranks_in_turn([RunStart("now", World(count), step) for step, count in starts]) == ranks


def test_json_is_valid_and_keeps_numbers_that_json_does_not_know() -> None:
    odd = Evaluation(samples=1, loss=math.inf, metrics={"mae": -math.inf, "mse": math.nan})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    read = decode(Evaluation, json.loads(to_json(odd), parse_constant=refuse))
    assert read.loss == math.inf
    assert read.metrics["mae"] == -math.inf
    assert math.isnan(read.metrics["mse"])


def test_a_cut_off_line_costs_only_itself_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_line(path, RECORD)
    append_line(path, replace(RECORD, epoch=2))
    path.write_bytes(path.read_bytes()[:-40])
    history = read_lines(path, EpochRecord)
    assert history.records == [RECORD]
    assert history.damage == [f"line 2 of {path} is cut off; it was left out"]


def test_appending_after_a_cut_off_line_does_not_lose_the_new_record(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_line(path, RECORD)
    path.write_bytes(path.read_bytes()[:-40])
    append_line(path, replace(RECORD, epoch=2))
    history = read_lines(path, EpochRecord)
    assert [record.epoch for record in history.records] == [2]
    assert len(history.damage) == 1
    assert "line 1" in history.damage[0]


@pytest.mark.parametrize("line", ["[]", "3", "{}", '{"epoch": "x"}', "null", "\udcff"])
def test_a_line_that_is_no_record_is_reported(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    append_line(path, RECORD)
    history = read_lines(path, EpochRecord)
    assert history.records == [RECORD]
    assert "line 1" in history.damage[0]
