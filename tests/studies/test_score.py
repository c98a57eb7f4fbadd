"""Scores: their metrics, their directions, and the table of the scores of folds."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import BadOption, UnknownName
from tutti.records.run import Evaluation, Summary, World
from tutti.studies.cross_validation.scores import FoldScores, best_first, write_scores
from tutti.studies.score import Score, score_by_metrics, score_of


def r2x(outputs: object, targets: object) -> float:
    return 0.0


def my_score(outputs: object, targets: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("given", "metrics", "name", "computed"),
    [
        ("f1", "auto", "f1", "auto,f1"),
        ("f1:higher", "none", "f1", "f1"),
        ("loss", "auto", "loss", "auto"),
        ("seconds", "auto", "seconds", "auto"),
        ("top3", "auto,top3", "top3", "auto,top3"),
        ("mine.py:hits:lower", "none", "hits:lower", "mine.py:hits"),
        ("sklearn.metrics:f1_score", "auto", "f1_score", "auto,sklearn.metrics:f1_score"),
        ("hits:higher", "mine.py:hits", "hits:higher", "mine.py:hits"),
        (my_score, "auto", "my_score", ["auto", my_score]),
        ("r2x:higher", [my_score, r2x], "r2x:higher", [my_score, r2x]),
    ],
)
def test_runs_compute_the_metric_of_the_score(given: Any, metrics: Any, name: str, computed: Any) -> None:
    found, more = score_of(given, metrics, "--score")
    assert (str(found), more) == (name, computed)
    assert Score.read(name) == found


@pytest.mark.parametrize(
    ("given", "metrics", "kind", "message"),
    [
        ("acuracy", "auto", UnknownName, "did you mean 'accuracy'"),
        ("hits", "mine.py:hits", BadOption, "write hits:higher or hits:lower"),
        ("mine.py:hits", "auto", BadOption, "write mine.py:hits:higher or mine.py:hits:lower"),
        (lambda outputs, targets: 0, "auto", BadOption, "does not say which values of '<lambda>'"),
    ],
)
def test_scores_without_a_direction_are_refused(
    given: Any, metrics: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        score_of(given, metrics, "--score")


def _held_out(loss: float, **metrics: float) -> Evaluation:
    return Evaluation(4, loss, metrics, confusion=[[2, 0, 0], [1, 0, 1]])


def _run(loss: float, **metrics: float) -> Summary:
    return Summary(None, _held_out(loss, **metrics), 0, 1, 1, 7, 3.0, 0.0, World(), {}, "")


def test_the_automatic_score_is_the_first_metric_of_all_runs_or_the_loss() -> None:
    both = [_held_out(1.0, mine=1.0, f1=0.5, accuracy=0.5), _held_out(1.0, accuracy=0.5)]
    assert score_by_metrics(both) == Score("accuracy", True)
    assert score_by_metrics([_held_out(1.0, mine=1.0)]) == score_by_metrics([]) == Score("loss", False)


def test_the_scores_of_folds(tmp_path: Path) -> None:
    runs = [_run(0.5, f1=0.9), None, _run(0.3, f1=0.7), _run(0.4, f1=math.nan)]
    found = FoldScores.of(Score("f1", True), runs)
    assert found.missing == [1, 3]
    assert (found.mean, found.deviation) == pytest.approx((0.8, math.sqrt(0.02)))
    assert (found.samples, found.seconds_each) == ((4, 0, 4, 4), 3.0)
    assert found.confusion == [[6, 0, 0], [3, 0, 3]]
    assert found.class_accuracy() == [1.0, 0.0]
    whole = FoldScores.of(Score("f1", True), [_run(0.5, f1=0.1)] * 4)
    assert best_first({"part": found, "whole": whole}) == ["whole", "part"]
    weighted = _held_out(0.5, f1=0.5)
    weighted = replace(weighted, confusion=[[1.5, 0.0], [1.0, 0.0]], weighted=True)
    both = FoldScores.of(Score("f1", True), [runs[0], replace(_run(0.5), validation=weighted)])
    assert both.confusion == [[3.5, 0, 0], [2, 0, 1]]
    losses = [FoldScores(Score("loss", False), (value,)) for value in (2.0, 1.0)]
    assert best_first({"a": losses[0], "b": losses[1]}) == ["b", "a"]
    write_scores(tmp_path / "scores.csv", {"one": found}, ["cat"])
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert [(row["of"], row["samples"], row["score"]) for row in rows] == [
        *(("fold 0", "4", "0.9"), ("fold 1", "0", ""), ("fold 2", "4", "0.7"), ("fold 3", "4", "")),
        *(("mean", "12", repr(found.mean)), ("standard deviation", "12", repr(found.deviation))),
        *(("class cat", "6", "1.0"), ("class 1", "6", "0.0")),
    ]
    write_scores(tmp_path / "scores.csv", {"one": both})
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert [row["samples"] for row in rows if row["of"].startswith("class")] == ["", ""]
