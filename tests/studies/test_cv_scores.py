"""Scores of folds are those that tutti's own metrics give, and each prediction counts once."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, r2_score

from tutti.data.parts import DataSet, Part
from tutti.errors import BadData, UnknownName
from tutti.records.predictions import Predictions
from tutti.studies.cross_validation.scores import MEASURES, Scores, out_of_fold, score_folds, write_scores
from tutti.studies.cross_validation.study import Findings, best_first, of_labels
from tutti.training.losses import LOSSES, named_loss
from tutti.training.metrics import METRICS, named_metrics
from tutti.training.targets import labelled, predicted

RANDOM = np.random.default_rng(0)


def predictions(outputs, targets, start=0):
    return Predictions(np.arange(start, start + len(outputs)), np.asarray(outputs), np.asarray(targets))


def scores_of_ours(found, metric, ignored=None):
    outputs, targets = labelled(torch.from_numpy(found.outputs), torch.from_numpy(found.targets), ignored)
    return metric.figure(metric.sum(outputs, targets).reshape(-1), len(targets))


OF_CLASSES = ("accuracy", "balanced_accuracy", "f1", "precision", "recall")
OF_AMOUNTS = ("mae", "mse", "rmse", "r2")


CASES = {
    "classes": (RANDOM.normal(size=(40, 7)), RANDOM.integers(0, 7, 40), (*OF_CLASSES, "top5", "mae")),
    "positions": (RANDOM.normal(size=(9, 6, 4)), RANDOM.integers(0, 6, (9, 4)), OF_CLASSES),
    "a logit": (RANDOM.normal(size=(30, 1)), RANDOM.integers(0, 2, 30), OF_CLASSES),
    "flags": (
        RANDOM.normal(size=(30, 3)),
        RANDOM.integers(0, 2, (30, 3)).astype(np.float32),
        OF_CLASSES,
    ),
    "a flag": (RANDOM.normal(size=(30, 1)), RANDOM.integers(0, 2, (30, 1)).astype(np.float32), OF_CLASSES),
    # One is never there, one is neither there nor predicted.
    "rare flags": (
        RANDOM.normal(size=(30, 3)) - [0, 0, 99],
        RANDOM.integers(0, 2, (30, 3)).astype(np.float32) * np.array([1, 0, 0], np.float32),
        OF_CLASSES,
    ),
    "amounts": (RANDOM.normal(size=(30, 1)), RANDOM.normal(size=30), OF_AMOUNTS),
    "several amounts": (RANDOM.normal(size=(30, 2, 3)), RANDOM.normal(size=(30, 2, 3)), OF_AMOUNTS),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_metrics_of_training(case):
    outputs, targets, names = CASES[case]
    found = predictions(outputs, targets)
    part = Part(torch.from_numpy(outputs), torch.from_numpy(targets))
    classes = None if part.targets.is_floating_point() else max(2, outputs.shape[1])
    data = DataSet(case, part, None, None, classes, ())
    loss = named_loss("bce" if "flag" in case or case == "a logit" else "auto", data)
    for name in names:
        score = score_folds([found], name)
        (metric,) = named_metrics(name, loss, data)
        assert score.folds[0] == pytest.approx(scores_of_ours(found, metric), rel=1e-12)
        assert score.out_of_fold == score.folds[0]
        assert MEASURES[name].better == METRICS[name].better


def test_samples_without_a_label_count_in_no_score():
    outputs, targets, _ = CASES["positions"]
    targets = np.where(RANDOM.random(targets.shape) < 0.3, -100, targets)
    found = predictions(outputs, targets)
    assert score_folds([found]).folds[0] == pytest.approx(
        scores_of_ours(found, METRICS["accuracy"], -100), rel=1e-12
    )
    assert score_folds([found]).confusion.sum() == (targets >= 0).sum()


def test_a_model_that_approaches_the_class_number_means_the_nearest():
    outputs, targets = RANDOM.normal(2, 2, (30, 1)), RANDOM.integers(0, 5, 30)
    found = predictions(outputs, targets)
    scores = score_folds([found], amounts=True)
    nearest = replace(METRICS["accuracy"], function=lambda one, its: predicted(one, its, amounts=True) == its)
    assert scores.folds[0] == pytest.approx(scores_of_ours(found, nearest), rel=1e-12)
    assert LOSSES["mse"].amounts
    assert sum(scores.confusion.diagonal()) == round(scores.folds[0] * 30)


def test_a_model_that_approaches_a_label_means_it_above_the_middle():
    found = predictions([[0.2], [0.4], [0.9], [-0.1]], np.float32([0, 0, 1, 0]))
    logits = predictions(found.outputs - 0.5, found.targets)
    for metric in ("accuracy", "balanced_accuracy", "f1"):
        assert score_folds([found, None], metric, amounts=True).folds[0] == 1
        assert score_folds([logits], metric).folds == (1,)
    assert score_folds([found], "mae", amounts=True).out_of_fold == pytest.approx(0.2)


def test_floats_are_labels_where_a_model_gives_logits_of_them():
    flags, amounts = (predictions([[0.5], [3.0]], np.float32([0, other])) for other in (1, 2))
    assert of_labels({"a": [flags, None], "b": [flags]}, {"a": "mse", "b": "bce"})
    assert not of_labels({"a": [flags]}, {"a": "mse"})
    assert not of_labels({"a": [flags], "b": [amounts]}, {"a": "bce", "b": "bce"})


@pytest.mark.parametrize(("metric", "expected"), [("accuracy", "bcae"), ("mse", "cbae")])
def test_candidates_without_a_score_of_some_fold_come_after_the_others(metric, expected):
    nan, folds = math.nan, (2, 2)
    scores = {
        "e": Scores(metric, (nan, nan), folds, nan),
        "a": Scores(metric, (nan, 0.99 if metric == "accuracy" else 0.01), folds, nan),
        "b": Scores(metric, (0.5, 0.7), folds, 0.6),
        "c": Scores(metric, (0.5, 0.5), folds, 0.5),
    }
    assert "".join(best_first(Findings(scores, [], (), {}, 0, {}))) == expected


def test_each_prediction_counts_once_out_of_fold():
    outputs, targets = np.eye(3)[[0, 1, 2, 0, 1, 2, 1]], np.array([0, 1, 1, 0, 2, 2, 0])
    folds = [predictions(outputs[:5], targets[:5]), None, predictions(outputs[5:], targets[5:], 5)]
    scores = score_folds(folds, classes=3)
    assert scores.folds[0] == 0.6
    assert math.isnan(scores.folds[1])
    assert scores.folds[2] == 0.5
    assert scores.missing == [1]
    assert scores.samples == (5, 0, 2)
    assert scores.out_of_fold == 4 / 7
    assert scores.mean == pytest.approx(0.55)
    assert scores.deviation == pytest.approx(math.sqrt(2) * 0.05)
    assert scores.confusion.tolist() == [[2, 1, 0], [0, 1, 1], [0, 1, 1]]
    assert scores.per_class == (2 / 3, 1 / 2, 1 / 2)


def test_predictions_of_all_folds_are_in_the_order_of_the_samples():
    folds = [
        Predictions(np.array(rows), np.array(rows)[:, None] + 0.5, np.array(rows))
        for rows in ([1, 4], [0, 3])
    ]
    found = out_of_fold([*folds, folds[0]])
    assert found.rows.tolist() == found.targets.tolist() == [0, 1, 1, 3, 4, 4]
    assert found.outputs[:, 0].tolist() == [0.5, 1.5, 1.5, 3.5, 4.5, 4.5]


def test_figures_of_scikit_learn_are_these():
    outputs, targets, _ = CASES["classes"]
    found, chosen = [predictions(outputs, targets)], outputs.argmax(1)
    assert score_folds(found, "f1").folds[0] == f1_score(targets, chosen, average="macro")
    assert score_folds(found, "balanced_accuracy").folds[0] == pytest.approx(
        balanced_accuracy_score(targets, chosen)
    )
    outputs, targets, _ = CASES["amounts"]
    scores = score_folds([predictions(outputs, targets)], "r2")
    assert scores.folds[0] == pytest.approx(r2_score(targets, outputs[:, 0]))
    assert scores.confusion is None
    assert score_folds([predictions(outputs, targets)]).metric == "mae"


def test_outputs_that_are_no_numbers_have_no_score():
    outputs = np.eye(3)
    broken = outputs.copy()
    broken[1, 1] = np.nan
    scores = score_folds([predictions(outputs, [0, 1, 2]), predictions(broken, [0, 1, 2], 3)])
    assert scores.folds[0] == 1.0
    assert scores.missing == [1]
    assert math.isnan(scores.out_of_fold)
    assert scores.confusion.sum() == 5
    assert scores.mean == 1.0
    assert math.isnan(scores.deviation)
    assert score_folds([predictions(np.full((2, 1), np.nan), [0, 1])]).confusion.sum() == 0


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(BadData, match="no fold has predictions"):
        score_folds([None, None])
    with pytest.raises(BadData, match="different shapes"):
        score_folds([predictions(np.eye(3), [0, 1, 2]), predictions(np.eye(2), [0, 1])])
    with pytest.raises(UnknownName, match="did you mean 'accuracy'"):
        score_folds([predictions(np.eye(3), [0, 1, 2])], "acuracy")
    with pytest.raises(BadData, match="top5"):
        score_folds([predictions(np.zeros((3, 1)), [0, 1, 0])], "top5")


def test_scores_are_written_as_a_table(tmp_path):
    scores = score_folds([predictions(np.eye(2)[[0, 1, 1]], [0, 1, 0]), None], classes=2)
    write_scores(tmp_path / "scores.csv", {"lenet/cosine": scores}, ("cat", "dog"))
    rows = list(csv.reader((tmp_path / "scores.csv").read_text().splitlines()))
    assert rows == [
        ["name", "metric", "of", "samples", "score"],
        ["lenet/cosine", "accuracy", "fold 0", "3", repr(2 / 3)],
        ["lenet/cosine", "accuracy", "fold 1", "0", ""],
        ["lenet/cosine", "accuracy", "mean", "3", repr(2 / 3)],
        ["lenet/cosine", "accuracy", "standard deviation", "3", ""],
        ["lenet/cosine", "accuracy", "out of fold", "3", repr(2 / 3)],
        ["lenet/cosine", "accuracy", "class cat", "2", "0.5"],
        ["lenet/cosine", "accuracy", "class dog", "1", "1.0"],
    ]


def test_predictions_are_read_as_they_were_written(tmp_path):
    found = predictions(np.eye(3, dtype=np.float32), [0, 1, 2])
    (tmp_path / "p.npz").write_bytes(found.as_bytes())
    again = Predictions.read(tmp_path / "p.npz")
    assert again.as_bytes() == found.as_bytes()
    np.savez(tmp_path / "q.npz", rows=found.rows, outputs=found.outputs[:2], targets=found.targets)
    with pytest.raises(BadData, match="do not belong together"):
        Predictions.read(tmp_path / "q.npz")
    np.savez(tmp_path / "r.npz", rows=found.rows)
    with pytest.raises(BadData, match="lacks outputs and targets"):
        Predictions.read(tmp_path / "r.npz")


@pytest.mark.parametrize("case", ["classes", "positions", "a logit", "flags"])
@pytest.mark.parametrize("name", ["auc", "average_precision"])
def test_figures_of_the_order_of_probabilities_are_those_of_training_and_may_be_missing(case, name):
    outputs, targets, _ = CASES[case]
    part = Part(torch.from_numpy(outputs), torch.from_numpy(targets))
    classes = None if part.targets.is_floating_point() else max(2, outputs.shape[1])
    data = DataSet(case, part, None, None, classes, ())
    loss = named_loss("bce" if classes is None else "auto", data)
    (metric,) = named_metrics(name, loss, data)
    one_class = predictions(outputs[:5], np.zeros_like(targets[:5]), start=len(targets))
    found = score_folds([predictions(outputs, targets), one_class], name)
    assert found.folds[0] == pytest.approx(
        metric.of_all(*labelled(part.stored_inputs, part.targets, -100 if classes else None)), abs=1e-12
    )
    assert found.missing == [1]
    assert found.metric == name
