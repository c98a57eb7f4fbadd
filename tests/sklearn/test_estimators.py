"""The estimators of scikit-learn: its own checks, and what is ours beside them."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import psutil
import pyarrow
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs, make_regression
from sklearn.model_selection import GridSearchCV, KFold, ParameterSampler, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)
from torch import nn

import tutti
from sklearn import config_context
from tutti.errors import BadModel, UnknownName
from tutti.sklearn import Classifier, Regressor
from tutti.sklearn.estimators import Estimator

pytestmark = pytest.mark.usefixtures("nothing_beside")

X, Y = make_blobs(60, centers=3, cluster_std=0.5, random_state=0)
X = X.astype(np.float32)
NAMES = np.array(["red", "green", "blue"])[Y]

classifier = partial(Classifier, model_options={"hidden": [8]}, lr=0.03, epochs=6, random_state=1)
regressor = partial(Regressor, model_options={"hidden": [8]}, lr=0.03, epochs=6, random_state=1)


def weights(estimator: Estimator) -> list[Any]:
    return [parameter.tolist() for parameter in estimator.module_.parameters()]


OF_FLOAT64 = {"check_sample_weight_equivalence_on_dense_data": "float32 rounds; below it is held in float64"}


@parametrize_with_checks(
    [classifier(epochs=10), regressor(epochs=10)],
    expected_failed_checks=lambda _: OF_FLOAT64,
    xfail_strict=False,  # Some processors round so that it passes.
)
def test_scikit_learns_own_checks(estimator: Estimator, check: Any) -> None:
    check(estimator)


def far(one: Estimator, other: Estimator) -> float:
    """Return the largest distance of two models' weights."""
    pairs = zip(one.module_.parameters(), other.module_.parameters(), strict=True)
    return max((here - there).abs().max().item() for here, there in pairs)


@pytest.mark.parametrize("kind", [classifier, regressor])
def test_a_weight_is_how_often_a_sample_counts(kind: Any) -> None:
    counts = np.random.default_rng(0).integers(0, 4, len(X))
    made = kind(precision="fp64", batch_size=1000)
    weighted = clone(made).fit(X, Y, sample_weight=counts)
    assert far(weighted, clone(made).fit(X.repeat(counts, 0), Y.repeat(counts))) < 1e-12
    assert far(weighted, clone(made).fit(X, Y, sample_weight=2.5 * counts)) < 1e-12
    plain = clone(made).fit(X, Y)
    assert far(plain, weighted) > 1e-3
    assert far(plain, clone(made).fit(X, Y, sample_weight=np.ones(len(X)))) < 1e-12
    check_sample_weight_equivalence_on_dense_data("", made)


def test_scikit_learn_routes_weights_through_pipelines_into_folds() -> None:
    counts = np.random.default_rng(0).integers(1, 4, len(X))
    with config_context(enable_metadata_routing=True):
        made = classifier(precision="fp64", batch_size=1000).set_fit_request(sample_weight=True)
        folds = KFold(3)
        found = cross_validate(
            make_pipeline(
                StandardScaler().set_fit_request(sample_weight=False),
                made.set_score_request(sample_weight=True),
            ),
            X,
            Y,
            cv=folds,
            params={"sample_weight": counts},
            return_estimator=True,
        )
    for pipeline, (train, _) in zip(found["estimator"], folds.split(X), strict=True):
        scaled = StandardScaler().fit_transform(X[train])
        alone = clone(made).fit(scaled, Y[train], sample_weight=counts[train])
        assert far(pipeline[-1], alone) < 1e-12


@pytest.mark.parametrize("wrong", [[1.0] * 59, [-1.0] + [1.0] * 59, [np.nan] * 60, np.zeros(60)])
def test_wrong_weights_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        classifier().fit(X, Y, sample_weight=wrong)


def test_a_fit_equals_tutti_train_with_random_state_as_its_seed() -> None:
    made = classifier().fit(X, Y)
    result = tutti.train(
        "mlp",
        (X, Y),
        model_options={"hidden": [8]},
        lr=0.03,
        epochs=6,
        validation=0.0,
        workers=1,
        threads=1,
        seed=1,
        quiet=True,
    )
    assert weights(made) == [parameter.tolist() for parameter in result.model.parameters()]
    assert [record.train for record in made.history_] == [record.train for record in result.history]
    assert made.summary_.parameters == result.summary.parameters
    assert weights(classifier(random_state=2).fit(X, Y)) != weights(made)


def test_another_kind_of_random_state_gives_one_seed_after_the_other() -> None:
    drawn = np.random.RandomState(3)
    first, second = (weights(classifier(steps=1, epochs=None, random_state=drawn).fit(X, Y)) for _ in "ab")
    again = classifier(steps=1, epochs=None, random_state=np.random.RandomState(3)).fit(X, Y)
    assert first == weights(again) != second


def test_inputs_are_not_scaled_and_probabilities_are_the_softmax_of_the_outputs() -> None:
    with pytest.warns(UserWarning, match="StandardScaler"):
        made = classifier().fit(X * 100, NAMES)
    with torch.no_grad():
        outputs = made.module_(torch.tensor(X * 100)).double()
    np.testing.assert_allclose(made.predict_proba(X * 100), outputs.softmax(1), rtol=1e-5, atol=1e-9)
    assert made.predict(X * 100).tolist() == made.classes_[outputs.argmax(1)].tolist()
    assert len(np.unique(made.predict(X * 100))) > 1


def test_labels_may_be_texts_and_keep_the_order_of_the_samples() -> None:
    made = classifier(epochs=40).fit(X, NAMES)
    assert made.classes_.tolist() == ["blue", "green", "red"]
    assert made.score(X, NAMES) > 0.9
    order = np.random.default_rng(0).permutation(len(X))
    assert made.predict(X[order]).tolist() == made.predict(X)[order].tolist()


def test_a_regressor_gives_numbers_of_the_shape_that_they_had() -> None:
    inputs, targets = make_regression(80, 3, n_targets=2, random_state=0)
    linear = regressor(model_options={"hidden": []}, lr=0.1, epochs=60)
    targets = StandardScaler().fit_transform(targets)
    both = clone(linear).fit(inputs, targets)
    assert both.predict(inputs).shape == (80, 2)
    assert both.score(inputs, targets) > 0.99
    assert both.score(inputs, targets[:, ::-1]) < 0.9
    assert linear.fit(inputs, targets[:, 0]).predict(inputs).shape == (80,)
    assert linear.fit(inputs, targets[:, :1]).predict(inputs).shape == (80, 1)


def test_whole_numbers_and_flags_are_amounts_for_a_regressor_and_classes_for_a_classifier() -> None:
    assert regressor().fit(X, Y).module_[-1].out_features == 1
    assert regressor().fit(X, np.stack([Y == 0, Y == 1], axis=1)).module_[-1].out_features == 2
    assert classifier().fit(X, Y * 1000.0).predict_proba(X).shape == (60, 3)


def test_a_pipeline_and_a_search_over_the_learning_rate_and_an_option_of_the_model() -> None:
    inputs, targets = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), classifier(epochs=15))
    grid = {
        "classifier__lr": [1e-9, 0.03],
        "classifier__model_options__hidden": [(4,), [16, 8]],
        "classifier__optimizer_options__weight_decay": np.array([0.0]),
    }
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(inputs, targets)
    assert search.best_params_["classifier__lr"] == 0.03
    best = search.best_estimator_[-1]
    assert best.module_[1].out_features == search.best_params_["classifier__model_options__hidden"][0]
    assert search.best_score_ > 0.8
    # The same, with the scaling done by hand.
    scaled = StandardScaler().fit_transform(inputs)
    assert weights(clone(best).fit(scaled, targets)) == weights(best)


def test_numbers_that_numpy_has_drawn_are_parameters() -> None:
    space = {"steps": np.arange(1, 4), "batch_size": np.array([16]), "model_options__hidden": [np.array([3])]}
    (drawn,) = ParameterSampler(space, 1, random_state=0)
    made = classifier(epochs=None).set_params(**drawn).fit(X, Y)
    assert (made.summary_.steps, made.module_[1].out_features) == (drawn["steps"], 3)


def test_options_of_parts_are_parameters() -> None:
    made = classifier(model_options={"hidden": [8], "dropout": 0.1})
    changed = clone(made).set_params(model_options__dropout=0.2, schedule_options__gamma=0.5)
    assert changed.model_options == {"hidden": [8], "dropout": 0.2}
    assert changed.schedule_options == {"gamma": 0.5}
    assert changed.get_params()["model_options__dropout"] == 0.2
    assert made.model_options == {"hidden": [8], "dropout": 0.1}
    with pytest.raises(ValueError, match="Invalid parameter 'modl_options'"):
        made.set_params(modl_options__dropout=0.2)
    with pytest.raises(UnknownName, match="hidden"):
        made.set_params(model_options__hiden=[4]).fit(X, Y)


def test_a_module_is_left_as_it_is_and_each_fit_begins_with_its_weights() -> None:
    module = nn.Linear(2, 3)
    before = [parameter.tolist() for parameter in module.parameters()]
    made = classifier(module, model_options=None).fit(X, Y)
    first = weights(made)
    assert weights(made.fit(X, Y)) == first != before
    assert [parameter.tolist() for parameter in module.parameters()] == before


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_model_has_one_output_for_each_class(outputs: int) -> None:
    made = classifier(nn.Linear(2, 3), model_options=None).fit(X, Y)
    made.module_ = nn.Linear(2, outputs)
    for ask in (made.predict, made.predict_proba):
        with pytest.raises(BadModel, match=rf"outputs of shape \({outputs},\) .*and y had 3 classes"):
            ask(X)


def test_images_keep_the_order_of_their_dimensions() -> None:
    """Their last dimension looks like colours: of an array, `tutti.train` would take it for the channels."""
    model = nn.Sequential(nn.Conv2d(5, 1, 1), nn.Flatten(), nn.Linear(12, 3))
    images = np.random.default_rng(0).normal(size=(60, 5, 4, 3))
    made = classifier(model, model_options=None, epochs=1).fit(images, Y)
    assert made.predict(images).shape == (60,)


def test_arrays_may_run_backwards_or_be_read_only() -> None:
    wanted, kept = regressor().fit(X, Y), X.copy()
    kept.flags.writeable = False
    for inputs in (X[::-1].copy()[::-1], kept):
        made = regressor().fit(inputs, Y.astype(np.float32)[::-1].copy()[::-1])
        assert made.predict(inputs).tolist() == wanted.predict(X).tolist()


def test_the_last_batch_normalisation_is_the_one_of_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    made = classifier(model, model_options=None).fit(X, Y)
    assert not made.module_.training
    alone = [made.predict_proba(X[place : place + 1])[0] for place in range(5)]
    np.testing.assert_allclose(alone, made.predict_proba(X)[:5], rtol=1e-5)


def test_predictions_are_of_the_precision_of_the_training() -> None:
    made = classifier(precision="fp64").fit(X, Y)
    with torch.no_grad():
        outputs = pickle.loads(pickle.dumps(made)).module_(torch.tensor(X).double())
    np.testing.assert_allclose(made.predict_proba(X), outputs.softmax(1), rtol=1e-13)
    assert next(made.module_.parameters()).dtype == torch.float64


def test_the_floats_are_those_of_the_program() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        made = regressor().fit(X, Y)
        plain = made.module_(torch.tensor(X).double())[:, 0].detach().numpy()
        assert made.predict(X).tolist() == (plain * Y.std() + Y.mean()).tolist()
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_worker_starts_no_process_and_uses_the_threads_of_this_one() -> None:
    before, threads = psutil.Process().children(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = classifier().fit(X, Y)
        assert made.summary_.world.threads == torch.get_num_threads() == 3
        assert classifier(threads=1).fit(X, Y).summary_.world.threads == 1
    finally:
        torch.set_num_threads(threads)
    assert psutil.Process().children() == before


def test_pickles_give_the_same_predictions_and_train_on(tmp_path: Path) -> None:
    made = classifier().fit(X, NAMES)
    joblib.dump(made, tmp_path / "model", compress=3)
    for copy in (pickle.loads(pickle.dumps(made)), joblib.load(tmp_path / "model")):
        assert copy.predict_proba(X).tolist() == made.predict_proba(X).tolist()
        assert copy.history_ == made.history_
        assert weights(copy.fit(X, NAMES)) == weights(made)
    assert pickle.loads(pickle.dumps(classifier())).get_params() == classifier().get_params()


BESIDE = threading.Event()


class Meeting(nn.Linear):
    """A model that looks for another one made meanwhile."""

    entered = 0

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        Meeting.entered += 1
        if Meeting.entered > 1:
            BESIDE.set()
        BESIDE.wait(0.1)
        super().__init__(*shape, outputs)
        Meeting.entered -= 1


def test_threads_train_one_after_the_other() -> None:
    threads = [
        threading.Thread(target=classifier(Meeting, model_options=None).fit, args=(X, Y)) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not BESIDE.is_set()


def people(samples: int = 60) -> tuple[Any, Any]:
    """A table with texts, a gap and a column of another size, and amounts in units of thousands."""
    random = np.random.default_rng(0)
    age, town = random.integers(20, 60, samples).astype(float), np.array(["Ulm", "Kiel", "Bonn"])
    towns = town[random.integers(0, 3, samples)]
    amounts = 1e3 * age + 2e4 * (towns == "Ulm")
    table = {
        "age": [None, *age[1:]],
        "town": towns.tolist(),
        "income": (1e5 * random.random(samples)).tolist(),
    }
    return pyarrow.table(table), amounts


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_tables_are_prepared_and_amounts_are_in_their_own_units(library: str) -> None:
    table, amounts = people()
    if library != "pyarrow":
        pytest.importorskip(library)
        table = table.to_pandas() if library == "pandas" else pytest.importorskip("polars").from_arrow(table)
    estimator = regressor(epochs=60).fit(table, amounts)
    assert estimator.score(table, amounts) > 0.9
    assert list(estimator.feature_names_in_) == ["age", "town", "income"]
    again = pickle.loads(pickle.dumps(estimator))
    assert again.predict(table[:7]) == pytest.approx(estimator.predict(table)[:7], rel=1e-4)


def test_a_classifier_of_tables_gives_the_labels_and_takes_weights() -> None:
    table, amounts = people()
    labels = np.where(amounts > 5e4, "rich", "poor")
    estimator = classifier(epochs=30).fit(table, labels)
    assert (estimator.predict(table) == labels).mean() > 0.9
    assert estimator.predict_proba(table).sum(1) == pytest.approx(1)
    weighted = classifier(epochs=30).fit(table, labels, sample_weight=(labels == "rich") * 1.0)
    assert set(weighted.predict(table)) == {"rich"}
    with pytest.raises(ValueError, match="inconsistent"):
        classifier().fit(table, labels[1:])
