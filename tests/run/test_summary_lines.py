"""What a run says: counts, confusion matrix, accuracy of each class."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.records.texts import figures, metric_text
from tutti.run import summary_lines

THREE = Evaluation(10, 0.25, {"accuracy": 0.8, "mae": 0.5}, [[4, 0, 0], [1, 3, 1], [0, 0, 0]])


def test_an_evaluation_shows_its_count_and_the_matrix_with_each_class() -> None:
    lines = summary_lines.evaluation("test", THREE, ("cat", "dog", "a very long class name")).splitlines()
    assert lines[0] == "test: 10 samples, accuracy 80.00%, mae 0.5, loss 0.25"
    assert " ".join(lines[-5].split()) == "true class | predicted as accuracy precision f1"
    assert lines[-3].split() == ["cat", "|", "4", ".", ".", "100.00%", "80.00%", "0.8889"]
    assert lines[-2].split() == ["dog", "|", "1", "3", "1", "60.00%", "100.00%", "0.7500"]
    assert lines[-1].split() == ["a", "very", "long…", "|", ".", ".", ".", "-", "0.00%", "0.0000"]


def test_samples_with_weights_are_said_to_be_weighted() -> None:
    found = Evaluation(4, 0.5, weighted=True)
    assert summary_lines.evaluation("test", found) == "test: 4 samples, weighted, loss 0.5"


def test_the_counts_name_every_part() -> None:
    text = summary_lines.counts("mlp", 1234, "digits", {"train": 1000, "test": 360}, (1, 8, 8))
    assert text == "model mlp: 1,234 parameters\ndata digits: 1,000 train, 360 test samples of 1x8x8"


def record(*ranks: RankRecord, validation_s: float = 0.0) -> EpochRecord:
    seconds = {"validation": validation_s, "total": 10.0 + validation_s}
    return EpochRecord(1, 8, True, THREE, None, seconds, 100.0, 0.1, "now", list(ranks))


def test_staleness_covers_all_ranks_and_epochs() -> None:
    aged = {"age_s_mean": 0.001, "age_s_p99": 0.002, "age_s_max": 0.003}
    first = RankRecord(
        exchanges=10, stages={"wait": 1.0, "forward": 19.0}, dropped=2, staleness={1: 100}, **aged
    )
    second = RankRecord(
        exchanges=30, stages={"wait": 3.0, "forward": 17.0}, staleness={3: 298, 6: 1, 7: 1}, **aged
    )
    assert summary_lines.exchanges([record(first, second), record(RankRecord(), RankRecord())]) == [
        "staleness: mean 2.52, 99th percentile 3, at most 7 updates",
        "dropped: 2 gradients that came too late",
    ]


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


def test_a_large_amount_is_a_whole_number() -> None:
    amounts = (250_512.3, -10_000.0, 9999.0, 0.12345, 1e9)
    assert [metric_text("mae", one) for one in amounts] == ["250,512", "-10,000", "9999", "0.1235", "1e+09"]


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.21537, "0.2154"), (9999.5, "9999.5000"), (44502991.0259, "44,502,991"), (1e12, "1e+12")],
)
def test_losses_of_large_amounts_are_whole_numbers(loss: float, text: str) -> None:
    assert figures(Evaluation(1, loss, {})) == f"loss {text}"
