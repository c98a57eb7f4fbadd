"""A score is the name of a figure, or whatever can be a metric of the runs."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.errors import BadOption, UserError
from tutti.studies.cross_validation.asked_score import asked_score
from tutti.studies.cross_validation.scores import measure_of


def r2(outputs: object, targets: object) -> float:
    return 0.0


def my_score(outputs: object, targets: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("given", "metrics", "name", "computed"),
    [
        ("auto", "f1", "auto", "f1"),
        ("f1", "auto", "f1", "auto"),
        ("f1:higher", "auto", "f1", "auto"),
        ("loss", "auto", "loss", "auto"),
        ("top3", "auto", "top3", "auto,top3"),
        ("top3", "auto,top3", "top3", "auto,top3"),
        ("mine.py:hits:lower", "none", "hits:lower", "mine.py:hits"),
        ("sklearn.metrics:f1_score", "auto", "f1_score", "auto,sklearn.metrics:f1_score"),
        ("hits:higher", "mine.py:hits", "hits:higher", "mine.py:hits"),
        (my_score, "auto", "my_score", ["auto", my_score]),
        ("r2x:higher", [my_score, "r2x"], "r2x:higher", [my_score, "r2x"]),
    ],
)
def test_the_runs_compute_what_predictions_do_not_tell(
    given: Any, metrics: Any, name: str, computed: Any
) -> None:
    found = asked_score(given, "--score", metrics)
    assert (found.name, found.among(metrics)) == (name, computed)


@pytest.mark.parametrize(
    ("given", "metrics", "message"),
    [
        ("acuracy", "auto", "did you mean 'accuracy'"),
        ("hits", "mine.py:hits", "write hits:higher or hits:lower"),
        ("mine.py:hits", "auto", "write mine.py:hits:higher or mine.py:hits:lower"),
        (lambda outputs, targets: 0, "auto", "does not say which values of '<lambda>'"),
        (r2, "auto", "a function called 'r2'"),
        (3, "auto", "is a int"),
    ],
)
def test_what_cannot_be_told_is_refused(given: Any, metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        asked_score(given, "--score", metrics)


def test_the_name_says_which_values_are_better() -> None:
    better = {name: measure_of(name).better for name in ("hits:lower", "my_error", "top3", "rmse", "loss")}
    assert better == {
        "hits:lower": "lower", "my_error": "lower", "top3": "higher", "rmse": "lower", "loss": "lower"
    }  # fmt: skip
    assert measure_of("top3").share
    with pytest.raises(BadOption):
        asked_score("hits", "--score", [my_score, "hits"])
