"""What a run says: counts, confusion matrix, accuracy of each class."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.reports.advice import advice, stages_by_rank
from tutti.run import summary_lines

THREE = Evaluation(10, 0.25, {"accuracy": 0.8, "mae": 0.5}, [[4, 0, 0], [1, 3, 1], [0, 0, 0]])


def test_an_evaluation_shows_its_count_and_the_matrix_with_each_class() -> None:
    lines = summary_lines.evaluation("test", THREE, ("cat", "dog", "a very long class name")).splitlines()
    assert lines[0] == "test: 10 samples, accuracy 80.00%, mae 0.5, loss 0.25"
    assert lines[-3].split() == ["cat", "4", ".", ".", "100.00%", "80.00%", "0.8889"]
    assert lines[-2].split() == ["dog", "1", "3", "1", "60.00%", "100.00%", "0.7500"]
    assert lines[-1].split() == ["a", "very", "long…", ".", ".", ".", "-", "0.00%", "0.0000"]


def test_many_classes_name_their_commonest_mistake_instead() -> None:
    confusion = [[0] * 30 for _ in range(30)]
    confusion[3][3], confusion[3][7], confusion[3][8] = 6, 3, 1
    lines = summary_lines.evaluation("test", Evaluation(10, 1.0, {}, confusion)).splitlines()
    assert lines[6].split() == ["3", "10", "60.00%", "100.00%", "0.7500", "7", "(3)"]


def test_the_counts_name_every_part() -> None:
    text = summary_lines.counts("mlp", 1234, "digits", {"train": 1000, "test": 360}, (1, 8, 8))
    assert text == "model mlp: 1,234 parameters\ndata digits: 1,000 train, 360 test samples of 1x8x8"


def record(*ranks: RankRecord, validation_s: float = 0.0) -> EpochRecord:
    seconds = {"validation": validation_s, "total": 10.0 + validation_s}
    return EpochRecord(1, 8, True, THREE, None, seconds, 100.0, 0.1, "now", list(ranks))


def test_staleness_and_waiting_are_those_of_all_ranks_and_epochs() -> None:
    aged = {"age_s_mean": 0.001, "age_s_p99": 0.002, "age_s_max": 0.003}
    first = RankRecord(
        exchanges=10, stages={"wait": 1.0, "forward": 19.0}, dropped=2, staleness={1: 100}, **aged
    )
    second = RankRecord(
        exchanges=30, stages={"wait": 3.0, "forward": 17.0}, staleness={3: 298, 6: 1, 7: 1}, **aged
    )
    assert summary_lines.exchanges([record(first, second), record(RankRecord(), RankRecord())]) == [
        "staleness: mean 2.52, 99th percentile 3, at most 7 updates",
        "waiting for others: 10% of the time; rank 1 the most, 15% of its own",
        "dropped: 2 gradients that came too late",
    ]


def test_waits_are_those_of_the_last_ranks_and_are_advised_on_as_much() -> None:
    alone, busy, waits = (
        RankRecord(samples=10, stages={"wait": wait, "forward": 10.0 - wait}) for wait in (0.0, 4.0, 6.0)
    )
    # It was begun alone, so that rank 0 has waited and computed for the longest time.
    mixed = RankRecord(samples=90, stages={"wait": 200.0, "forward": 900.0})
    history = [record(alone), record(mixed, waits), record(busy, waits)]
    lines = summary_lines.exchanges(history)
    assert lines == ["waiting for others: 50% of the time on 2 ranks; rank 1 the most, 60% of its own"]
    said = advice(stages_by_rank(history), {}, None)
    assert said.startswith("waiting for others takes 50% of the time: ")
    assert "rank 0 is the slowest: a sample takes it 1.5 times as long" in said


def test_validation_beside_training_tells_what_it_cost() -> None:
    text = summary_lines.validation("background", [record(validation_s=0.1), record(validation_s=2.5)])
    assert (
        text == "validation (background): held training up for 0.5% of its time, and took 2.5 s after its end"
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "1 rank"),
        ((4, 1), "4 and 1 ranks in turn"),
        ((1, 2, 4, 1), "1, 2, 4 and 1 ranks in turn"),
        ((3, 2, 1, 4, 3, 1), "1 to 4 ranks in turn"),
    ],
)
def test_all_numbers_of_ranks_that_a_run_had_are_named(ranks: tuple[int, ...], words: str) -> None:
    summary = Summary(None, None, 10, 1, 50, 1600, 2.0, 800.0, World(), {}, "now", ranks_in_turn=ranks)
    assert summary_lines.speed(summary) == f"trained 50 steps (1 epoch) on {words} in 2.0 s: 800 samples/s"


def test_an_early_end_says_why_and_which_weights_are_left() -> None:
    summary = Summary(None, None, 10, 5, 50, 1600, 2.0, 800.0, World(), {}, "now")
    assert summary_lines.ending(summary) == []
    early = replace(summary, ended_early="training loss was 0.05 in epoch 5, < 0.1")
    assert summary_lines.ending(early) == ["ended early: training loss was 0.05 in epoch 5, < 0.1"]
    assert summary_lines.ending(replace(summary, best_epoch=3)) == []
    best = replace(summary, best_epoch=3, restored=True, validation=Evaluation(10, 0.25, {"accuracy": 0.8}))
    assert summary_lines.ending(best) == [
        "weights: those of epoch 3, the best: validation loss 0.2500  accuracy 80.00%"
    ]
    assert summary_lines.ending(replace(best, validation=None)) == ["weights: those of epoch 3, the best"]
