"""Tests of the choice of ensembles: on worked numbers, and on samples that nothing was chosen by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tutti.errors import BadData, BadOption
from tutti.records.output_kinds import Kind
from tutti.records.predictions import Predictions
from tutti.studies.ensemble.choosing import BEST, ENSEMBLE, Trained, choose, held_out_values
from tutti.studies.ensemble.combining import METHODS, fit
from tutti.studies.ensemble.library import Library, kind_of, library_of

Array = NDArray[np.float64]


def _library(values: Array, targets: Array, kind: Kind = Kind.AMOUNTS, folds: int = 2) -> Library:
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
    found = fit("greedy", _amounts([1, 1], [-2, -2], truth=[0, 0]))
    assert found.candidates == ("a", "b")
    assert found.weights == pytest.approx((2 / 3, 1 / 3), abs=1e-15)


def test_greedy_selection_begins_with_the_best_prefix() -> None:
    # Sorted: 1, -1, 3. The mean of the first two is right, and with the third it is not.
    found = fit("greedy", _amounts([3, 3], [1, 1], [-1, -1], truth=[0, 0]))
    assert dict(zip(found.candidates, found.weights, strict=True)) == {"b": 0.5, "c": 0.5}


def _trained(library: Library, repeats: int = 1) -> Trained:
    """All samples in two folds, divided in another way in each repeat."""
    parts = [
        library.at(np.ones(len(library.rows), bool)).at(np.isin(library.rows // 2**repeat % 2, [fold]))
        for repeat in range(repeats)
        for fold in (0, 1)
    ]
    joined = Library(
        library.names,
        library.kind,
        np.concatenate([part.values for part in parts], axis=1),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts]),
    )
    return Trained(joined, "auto", 3, False, [1.0] * len(parts), [])


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10_000), fold=st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_nothing_is_chosen_by_the_samples_that_it_is_scored_on(method: str, seed: int, fold: int) -> None:
    trained = _trained(_classes(seed, 4, 40), repeats=2)
    library = trained.library
    own = np.isin(library.rows, library.rows[library.folds == fold])
    # Other targets of these samples, in every repeat: all that was chosen for this fold stays as it was.
    targets = np.where(own, (library.targets + 1) % 3, library.targets)
    changed = Trained(
        Library(library.names, library.kind, library.values, targets, library.rows, library.folds),
        *("auto", 3, False, trained.ratios, []),
    )
    for before, after in zip(
        held_out_values(trained, fold, method, 2), held_out_values(changed, fold, method, 2), strict=True
    ):
        np.testing.assert_array_equal(before.rows, after.rows)
        np.testing.assert_array_equal(before.outputs, after.outputs)
        assert not np.array_equal(before.targets, after.targets)


def test_the_best_of_many_that_guess_is_not_scored_by_its_luck() -> None:
    draw = np.random.default_rng(1)
    targets = draw.integers(0, 2, 60)
    values = np.eye(2)[draw.integers(0, 2, (10, 60))] * 0.8 + 0.1
    found = choose(_trained(_library(values, targets, Kind.CLASSES)), "greedy")
    luck = max(found.scores[name].mean for name in "abcdefghij")
    assert found.scores[BEST].mean < luck - 0.05


def test_three_that_err_independently_are_better_together() -> None:
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 3, 400)
    logits = draw.normal(size=(3, 400, 3)) + 1.0 * np.eye(3)[targets]
    values = Kind.CLASSES.values(logits.reshape(-1, 3)).reshape(logits.shape)
    found = choose(_trained(_library(values, targets, Kind.CLASSES), repeats=3), "mean")
    assert found.combination.weights == pytest.approx([1 / 3] * 3)
    assert found.gain.better == ENSEMBLE
    assert found.gain.sentence.startswith("the ensemble is better than the best single model by ")


def test_labels_of_0_or_1_are_scored_by_how_many_are_right() -> None:
    targets = np.array([0.0, 1, 0, 1, 1, 0, 1, 0])
    values = np.array([np.where(targets, 0.9, 0.1), np.where(targets, 0.4, 0.6)])[..., None]
    trained = replace(_trained(_library(values, targets, Kind.FLAGS)), metric="accuracy", classes=None)
    found = choose(trained, "greedy")
    assert found.combination.candidates == ("a",)
    assert (found.scores["a"].mean, found.scores["b"].mean, found.scores[ENSEMBLE].mean) == (1.0, 0.0, 1.0)


def test_bad_input() -> None:
    trained = _trained(_classes(0, 3, 20))
    with pytest.raises(BadOption, match="--top is 4, and the candidates that have finished are 3: a, b, c"):
        choose(trained, "mean", 4)
    single = Trained(trained.library.at(trained.library.folds == 0), "auto", 3, False, [1.0], [])
    with pytest.raises(BadData, match="a single fold"):
        choose(single, "mean")


def _predictions(outputs: Array, targets: NDArray[np.generic]) -> list[Predictions]:
    rows = np.arange(len(targets))
    return [Predictions(rows[:2], outputs[:2], targets[:2]), Predictions(rows[2:], outputs[2:], targets[2:])]


def test_candidates_that_mean_different_things_are_refused() -> None:
    targets = np.array([0, 1, 2, 1])
    three, four = (_predictions(np.zeros((4, count)), targets) for count in (3, 4))
    with pytest.raises(BadData, match="b and a cannot be combined: the outputs of one are 4 classes"):
        library_of({"a": three, "b": four}, {"a": "nll", "b": "cross_entropy"})
    with pytest.raises(BadData, match="3 amounts, those of the other 3 classes"):
        library_of({"a": three, "b": three}, {"a": "nll", "b": "mse"})
    with pytest.raises(BadData, match="different samples"):
        library_of(
            {"a": three, "b": _predictions(np.zeros((4, 3)), targets[::-1])}, dict.fromkeys("ab", "nll")
        )
    broken = _predictions(np.full((4, 3), np.nan), targets)
    with pytest.raises(BadData, match="not finite"):
        library_of({"a": broken}, {"a": "nll"})
    with pytest.raises(BadData, match="shares of classes"):
        kind_of("cross_entropy", Predictions(np.arange(2), np.zeros((2, 3)), np.full((2, 3), 1 / 3)))


def test_a_class_at_each_position_is_a_sample_each() -> None:
    targets = np.array([[0, -100], [1, 2], [2, 2], [0, 1]])
    found = library_of({"a": _predictions(np.zeros((4, 3, 2)), targets)}, {"a": "cross_entropy"})
    assert found.values.shape == (1, 7, 3)
    np.testing.assert_array_equal(found.targets, [0, 1, 2, 2, 2, 0, 1])
    np.testing.assert_array_equal(found.rows, [0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(found.folds, [0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("kind", list(Kind))
def test_values_are_outputs_again(kind: Kind) -> None:
    outputs = np.random.default_rng(0).normal(size=(5, 3))
    values = kind.values(outputs)
    np.testing.assert_allclose(kind.values(kind.outputs(values)), values, rtol=1e-12)
