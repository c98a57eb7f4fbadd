"""What a run says: counts, confusion matrix, accuracy of each class."""

from __future__ import annotations

from tutti.experiments import report
from tutti.records import Evaluation

THREE = Evaluation(10, 0.25, {"accuracy": 0.8, "mae": 0.5}, [[4, 0, 0], [1, 3, 1], [0, 0, 0]])


def test_an_evaluation_shows_its_count_and_the_matrix_with_each_class() -> None:
    lines = report.evaluation("test", THREE, ("cat", "dog", "a very long class name")).splitlines()
    assert lines[0] == "test: 10 samples, accuracy 80.00%, mae 0.5, loss 0.25"
    assert lines[-3].split() == ["cat", "4", ".", ".", "100.00%"]
    assert lines[-2].split() == ["dog", "1", "3", "1", "60.00%"]
    assert lines[-1].split() == ["a", "very", "long…", ".", ".", ".", "-"]


def test_many_classes_name_their_commonest_mistake_instead() -> None:
    confusion = [[0] * 30 for _ in range(30)]
    confusion[3][3], confusion[3][7], confusion[3][8] = 6, 3, 1
    lines = report.evaluation("test", Evaluation(10, 1.0, {}, confusion)).splitlines()
    assert lines[6].split() == ["3", "10", "60.00%", "7", "(3)"]


def test_without_classes_there_is_one_line() -> None:
    assert report.evaluation("validation", Evaluation(5, 2.0)) == "validation: 5 samples, loss 2"


def test_the_counts_name_every_part() -> None:
    text = report.counts("mlp", 1234, "digits", {"train": 1000, "test": 360}, (1, 8, 8))
    assert text == "model mlp: 1,234 parameters\ndata digits: 1,000 train, 360 test samples of 1x8x8"
