"""The choice of ensembles, with worked numbers and on held-out samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tutti.errors import BadData, BadOption, UnknownName
from tutti.records.output_kinds import Kind
from tutti.records.predictions import Predictions
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, METHODS, Selection, choose, fit
from tutti.studies.ensemble.library import Library, library_of

Array = NDArray[np.float64]


def _library(values: Array, targets: Array, kind: Kind = Kind.REGRESSION, folds: int = 2) -> Library:
    names = tuple("abcdefghij"[: len(values)])
    rows = np.arange(len(targets))
    return Library(names, kind, values, targets, rows, rows % folds)


def _amounts(*candidates: list[float], truth: list[float]) -> Library:
    return _library(np.array(candidates)[..., None], np.array(truth))


def _classes(seed: int, candidates: int, samples: int, classes: int = 3) -> Library:
    """Candidates of probabilities, each better than the one before."""
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, classes, samples)
    logits = draw.normal(size=(candidates, samples, classes))
    logits += np.arange(candidates)[:, None, None] * np.eye(classes)[targets]
    return _library(
        Kind.CLASSES.values(logits.reshape(-1, classes)).reshape(logits.shape), targets, Kind.CLASSES
    )


def test_greedy_selection_takes_a_candidate_twice() -> None:
    # Of 1 and -2 for 0: the best alone errs by 1, the mean by -1/2, and 1, 1, -2 not at all.
    found = fit(_amounts([1, 1], [-2, -2], truth=[0, 0]), "greedy")
    assert found == pytest.approx({"a": 2 / 3, "b": 1 / 3}, abs=1e-15)


def test_greedy_selection_begins_with_the_best_prefix() -> None:
    # Sorted: 1, -1, 3. The mean of the first two is right, and with the third it is not.
    found = fit(_amounts([3, 3], [1, 1], [-1, -1], truth=[0, 0]), "greedy")
    assert found == {"b": 0.5, "c": 0.5}


def _folded(library: Library, repeats: int = 1) -> Library:
    """All samples in two folds, divided in another way in each repeat."""
    parts = [library.rows // 2**repeat % 2 == fold for repeat in range(repeats) for fold in (0, 1)]
    at = np.concatenate([np.flatnonzero(part) for part in parts])
    folds = np.repeat(np.arange(len(parts)), [part.sum() for part in parts])
    return replace(
        library, values=library.values[:, at], targets=library.targets[at], rows=library.rows[at], folds=folds
    )


def _chosen(library: Library, method: str, top: int | None = None) -> Selection:
    return choose(library, [1.0] * (int(library.folds.max()) + 1), method, top)


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10_000), fold=st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_the_held_out_samples_do_not_affect_the_choice(method: str, seed: int, fold: int) -> None:
    library = _folded(_classes(seed, 4, 40), repeats=2)
    own = np.isin(library.rows, library.rows[library.folds == fold])
    # Other targets of these samples, in every repeat, do not change the choice for this fold.
    changed = replace(library, targets=np.where(own, (library.targets + 1) % 3, library.targets))
    rests = [one.fold(fold)[1] for one in (library, changed)]
    assert not np.isin(rests[0].rows, library.rows[own]).any()
    np.testing.assert_array_equal(rests[0].targets, rests[1].targets)
    np.testing.assert_array_equal(rests[0].values, rests[1].values)
    assert fit(rests[0], method, 2) == fit(rests[1], method, 2)


def test_the_best_of_many_guesses_does_not_profit_from_luck() -> None:
    draw = np.random.default_rng(1)
    targets = draw.integers(0, 2, 60)
    values = np.eye(2)[draw.integers(0, 2, (10, 60))] * 0.8 + 0.1
    found = _chosen(_folded(_library(values, targets, Kind.CLASSES)), "greedy")
    luck = max(found.scores[name].mean for name in "abcdefghij")
    assert found.scores[BEST].mean < luck - 0.05


def test_three_models_with_independent_errors_are_better_together() -> None:
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 3, 400)
    logits = draw.normal(size=(3, 400, 3)) + 1.0 * np.eye(3)[targets]
    values = Kind.CLASSES.values(logits.reshape(-1, 3)).reshape(logits.shape)
    found = _chosen(_folded(_library(values, targets, Kind.CLASSES), repeats=3), "mean")
    assert [*found.weights.values()] == pytest.approx([1 / 3] * 3)
    assert found.gain.better == ENSEMBLE
    assert found.gain.sentence.startswith("the ensemble is better than the best single model by ")


def test_labels_of_0_or_1_are_scored_by_accuracy() -> None:
    targets = np.array([0.0, 1, 0, 1, 1, 0, 1, 0])
    values = np.array([np.where(targets, 0.9, 0.1), np.where(targets, 0.4, 0.6)])[..., None]
    found = _chosen(_folded(_library(values, targets, Kind.FLAGS)), "greedy")
    assert found.weights == {"a": 1.0}
    assert (found.scores["a"].mean, found.scores["b"].mean, found.scores[ENSEMBLE].mean) == (1.0, 0.0, 1.0)


def test_bad_input() -> None:
    library = _folded(_classes(0, 3, 20))
    with pytest.raises(BadOption, match="--top is 4, and the candidates that have finished are 3: a, b, c"):
        _chosen(library, "mean", 4)
    with pytest.raises(BadData, match="with two folds"):
        choose(library, [1.0], "mean")
    with pytest.raises(UnknownName, match="'greedy'"):
        _chosen(library, "greed")


def _predictions(outputs: Array, targets: NDArray[np.generic]) -> list[Predictions]:
    rows = np.arange(len(targets))
    return [Predictions(rows[:2], outputs[:2], targets[:2]), Predictions(rows[2:], outputs[2:], targets[2:])]


def test_candidates_with_different_outputs_are_refused() -> None:
    targets = np.array([0, 1, 2, 1])
    three, four = (_predictions(np.zeros((4, count)), targets) for count in (3, 4))
    classes = dict.fromkeys("ab", Kind.CLASSES)
    turned = _predictions(np.zeros((4, 3)), targets[::-1])
    for other, kinds in (
        (four, classes),
        (three, {"a": Kind.CLASSES, "b": Kind.REGRESSION}),
        (turned, classes),
    ):
        with pytest.raises(BadData, match="b and a cannot be combined"):
            library_of({"a": three, "b": other}, kinds)
    with pytest.raises(BadData, match="not finite"):
        library_of({"a": _predictions(np.full((4, 3), np.nan), targets)}, classes)
    with pytest.raises(BadData, match="shares of classes"):
        library_of({"a": _predictions(np.zeros((4, 3)), np.full((4, 3), 1 / 3))}, classes)


def test_each_position_with_a_class_is_a_sample() -> None:
    targets = np.array([[0, -100], [1, 2], [2, 2], [0, 1]])
    found = library_of({"a": _predictions(np.zeros((4, 3, 2)), targets)}, {"a": Kind.CLASSES})
    assert found.values.shape == (1, 7, 3)
    np.testing.assert_array_equal(found.targets, [0, 1, 2, 2, 2, 0, 1])
    np.testing.assert_array_equal(found.rows, [0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(found.folds, [0, 0, 0, 1, 1, 1, 1])
