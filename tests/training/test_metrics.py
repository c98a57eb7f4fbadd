"""Metrics: their values, and that they add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, mean_absolute_error, top_k_accuracy_score
from torch import Tensor, nn
from torch.nn import functional

from sklearn import metrics as sk
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.parts import DataSet, Part
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.records.run import Evaluation
from tutti.training.evaluation import Objective, Tally, evaluate
from tutti.training.losses import LOSSES, named_loss
from tutti.training.metrics import METRICS, fitted, named_metrics
from tutti.training.metrics.built_in import top
from tutti.training.precision import Arithmetic

FP64 = Arithmetic(precision="fp64")
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(500, 10, generator=GENERATOR)
LABELS = torch.randint(0, 10, (500,), generator=GENERATOR)


def data_set(targets: Tensor) -> DataSet:
    part = Part(torch.zeros(len(targets), 2), targets)
    return DataSet("made up", part, None, None, None, ())


def names(spec, loss: str, targets: Tensor) -> list[str]:
    data = data_set(targets)
    return [metric.name for metric in named_metrics(spec, named_loss(loss, data), data)]


def test_metrics_are_those_of_scikit_learn() -> None:
    accuracy = METRICS["accuracy"].sum(SCORES, LABELS).item() / 500
    assert accuracy == pytest.approx(accuracy_score(LABELS, SCORES.argmax(1)))
    top5 = top(5).sum(SCORES, LABELS).item() / 500
    assert top5 == pytest.approx(top_k_accuracy_score(LABELS, SCORES, k=5))
    numbers, targets = SCORES[:, :2], SCORES[:, 2:4]
    mae = METRICS["mae"].sum(numbers, targets).item() / 500
    assert mae == pytest.approx(mean_absolute_error(targets, numbers))


@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_a_single_output_that_approaches_the_class_number_means_the_nearest_class(loss: str) -> None:
    inputs = torch.tensor([[0.1], [0.4], [0.6], [1.2], [2.2], [-3.0]])
    part = Part(inputs, torch.tensor([0, 1, 1, 1, 2, 0]))
    data = DataSet("made up", part, None, None, 3, ())
    loss_used = named_loss(loss, data)
    metrics = named_metrics("auto", loss_used, data)
    found = VirtualWorld(2).run(
        lambda comm: evaluate(torch.nn.Identity(), part, comm, Objective(loss_used, metrics, 3)).total(comm)
    )
    assert found[0].metrics == {"accuracy": pytest.approx(5 / 6)}
    assert found[0].confusion == [[2, 0, 0], [1, 2, 0], [0, 0, 1]]


def test_auto_follows_targets_and_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = torch.randn(4)
    two = ["accuracy", "balanced_accuracy", "auc"]
    assert names("auto", "auto", torch.arange(4)) == names("auto", "mse", torch.arange(4)) == ["accuracy"]
    assert names("auto", "auto", torch.arange(4) % 2) == names("auto", "mse", torch.arange(4) % 2) == two
    assert names("auto", "auto", torch.ones(3, 2).long()) == ["accuracy"]  # a label for each position
    monkeypatch.setattr("tutti.training.metrics.MOST_RANKED", 3)
    assert names("auto", "auto", torch.arange(4) % 2) == two[:2]
    assert names("auto", "auto", floats) == ["mae", "rmse", "r2"]
    assert names("auto", "bce", torch.tensor([0.0, 0.5])) == []
    assert names("auto", "bce", torch.tensor([0.0, 1.0])) == two
    assert names("auto", "bce", torch.eye(2)) == ["accuracy"]
    assert names("none", "auto", floats) == []
    assert names("accuracy, top5", "auto", torch.arange(4)) == ["accuracy", "top5"]


def test_a_callable_may_give_a_value_for_each_sample_or_one_for_all() -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) != targets

    def worst(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none").max()

    data = data_set(LABELS)
    each, all_at_once = (
        fitted(metric, SCORES[:2], LABELS[:2], LABELS)
        for metric in named_metrics([wrong, worst], named_loss("auto", data), data)
    )
    assert [(one.name, one.better, one.gathers) for one in (each, all_at_once)] == [
        ("wrong", None, False),
        ("worst", None, True),
    ]
    found = figures(LABELS, SCORES.double(), [each, all_at_once], ranks=3)
    assert found["wrong"] == 1 - accuracy_score(LABELS, SCORES.argmax(1))
    assert found["worst"] == float(worst(SCORES.double(), LABELS))


def test_bad_metrics_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'accuracy'"):
        names("acuracy", "auto", LABELS)
    with pytest.raises(BadOption, match="given twice"):
        names("accuracy,accuracy", "auto", LABELS)
    with pytest.raises(BadOption, match="not a function"):
        names([3], "auto", LABELS)
    with pytest.raises(BadOption, match="not a function"):
        names([torch.nn.Linear], "auto", LABELS)
    with pytest.raises(UnknownName, match="topK"):
        names("top0", "auto", LABELS)
    data = data_set(LABELS)
    (three,) = named_metrics(lambda outputs, targets: outputs[:3, 0], named_loss("auto", data), data)
    with pytest.raises(BadModel, match="one value for each of 500 samples"):
        fitted(three, SCORES, LABELS, LABELS)


def figures(targets, outputs, metrics, loss="auto", ranks=1, classes=None):
    """The metrics by name, of samples that are cut over virtual ranks, one of which may have none."""
    data = replace(data_set(targets), classes=classes)
    used = named_loss(loss, data)
    if isinstance(metrics, str):
        metrics = [
            fitted(metric, outputs[:2], targets[:2], targets) for metric in named_metrics(metrics, used, data)
        ]
    part = Part(outputs, targets)

    def program(comm):
        objective = Objective(used, metrics, None, FP64)
        return evaluate(nn.Identity(), part, comm, objective, batch_size=7).total(comm).metrics

    found, *others = VirtualWorld(ranks).run(program)
    assert all(other == found for other in others)
    return found


RANDOM = torch.Generator().manual_seed(3)
SKEWED = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), 60, replacement=True, generator=RANDOM)
LOGITS = torch.randn(60, 4, dtype=torch.float64, generator=RANDOM)
LOGITS[:, 1] = LOGITS[:, 1].round()  # ties
FLAGS = (torch.rand(60, 3, generator=RANDOM) < 0.4).float()


def by_scikit_learn(targets, found, probabilities) -> dict[str, float]:
    kinds = {"f1": sk.f1_score, "precision": sk.precision_score, "recall": sk.recall_score}
    figures = {name: kind(targets, found, average="macro", zero_division=0) for name, kind in kinds.items()}
    columns = probabilities.T
    there = (targets[:, None] == np.arange(len(columns))).T if targets.ndim == 1 else targets.T
    pairs = [(one, column) for one, column in zip(there, columns, strict=True) if one.any()]
    figures["auc"] = np.mean([sk.roc_auc_score(*pair) for pair in pairs])
    figures["average_precision"] = np.mean([sk.average_precision_score(*pair) for pair in pairs])
    return figures


OF_CLASSES = "f1,precision,recall,auc,average_precision"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_counted_and_ranking_metrics_are_those_of_scikit_learn_on_any_number_of_ranks(ranks: int) -> None:
    probabilities = LOGITS.softmax(1).numpy()
    wanted = by_scikit_learn(SKEWED.numpy(), LOGITS.argmax(1).numpy(), probabilities)
    wanted["balanced_accuracy"] = sk.balanced_accuracy_score(SKEWED, LOGITS.argmax(1))
    wanted["top3"] = sk.top_k_accuracy_score(SKEWED, LOGITS, k=3)
    found = figures(SKEWED, LOGITS, f"{OF_CLASSES},balanced_accuracy,top3", ranks=ranks, classes=4)
    assert found == pytest.approx(wanted, rel=1e-12)

    logits = LOGITS[:, :3]
    wanted = by_scikit_learn(FLAGS.numpy(), (logits > 0).numpy(), logits.sigmoid().numpy())
    assert figures(FLAGS, logits, OF_CLASSES, "bce", ranks) == pytest.approx(wanted, rel=1e-12)

    one = torch.stack([-logits[:, 0], logits[:, 0]], 1).sigmoid().numpy()
    wanted = by_scikit_learn(FLAGS[:, 0].numpy(), (logits[:, 0] > 0).numpy(), one)
    assert figures(FLAGS[:, :1], logits[:, :1], OF_CLASSES, "bce", ranks) == pytest.approx(wanted, rel=1e-12)


NUMBERS = torch.rand(60, dtype=torch.float64, generator=RANDOM) * 3
NUMBERS[::11] = 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_of_samples_count_as_in_scikit_learn(ranks: int) -> None:
    def found(targets: Tensor, outputs: Tensor, spec: str, loss: str, classes: int | None) -> Evaluation:
        part = Part(outputs, targets, stored_weights=NUMBERS)
        data = DataSet("made up", part, None, None, classes, ())
        used = named_loss(loss, data)
        made = [
            fitted(one, outputs[:2], targets[:2], targets, True) for one in named_metrics(spec, used, data)
        ]
        objective = Objective(used, made, classes, FP64, weighted=True)
        first, *others = VirtualWorld(ranks).run(
            lambda comm: evaluate(nn.Identity(), part, comm, objective, batch_size=7).total(comm)
        )
        assert all(other == first for other in others)
        return first

    told = {"sample_weight": NUMBERS.numpy()}
    classes, probabilities = LOGITS.argmax(1), LOGITS.softmax(1)
    of_each = list(zip((SKEWED[:, None] == torch.arange(4)).T, probabilities.T, strict=True))
    wanted = {
        "accuracy": sk.accuracy_score(SKEWED, classes, **told),
        "f1": sk.f1_score(SKEWED, classes, average="macro", **told),
        "balanced_accuracy": sk.balanced_accuracy_score(SKEWED, classes, **told),
        "top3": sk.top_k_accuracy_score(SKEWED, LOGITS, k=3, **told),
        "auc": np.mean([sk.roc_auc_score(*pair, **told) for pair in of_each]),
        "average_precision": np.mean([sk.average_precision_score(*pair, **told) for pair in of_each]),
        "matthews_corrcoef": sk.matthews_corrcoef(SKEWED, classes, **told),
    }
    spec = ",".join(wanted).replace("matthews", "sklearn.metrics:matthews")
    seen = found(SKEWED, LOGITS, spec, "auto", 4)
    assert seen.metrics == pytest.approx(wanted, rel=1e-12)
    assert seen.loss == pytest.approx(sk.log_loss(SKEWED, probabilities, **told), rel=1e-12)
    assert np.array(seen.confusion) == pytest.approx(sk.confusion_matrix(SKEWED, classes, **told), rel=1e-12)
    assert seen.samples == 60

    flags, logits = FLAGS.numpy(), LOGITS[:, :3]
    wanted = {"recall": sk.recall_score(flags, (logits > 0).numpy(), average="macro", **told)}
    wanted["auc"] = sk.roc_auc_score(flags, logits, **told)
    assert found(FLAGS, logits, "recall,auc", "bce", None).metrics == pytest.approx(wanted, rel=1e-12)

    numbers, targets = LOGITS[:, 0], LOGITS[:, 2] + 1e3
    wanted = {"mae": sk.mean_absolute_error, "rmse": sk.root_mean_squared_error, "r2": sk.r2_score}
    wanted = {name: of(targets, numbers, **told) for name, of in wanted.items()}
    seen = found(targets, numbers, "auto", "auto", None)
    assert seen.metrics == pytest.approx(wanted, rel=1e-9)


def test_a_metric_of_all_samples_that_takes_no_weights_is_refused() -> None:
    data = data_set(LABELS)
    (metric,) = named_metrics(lambda outputs, targets: 1.0, named_loss("auto", data), data)
    with pytest.raises(BadOption, match="sample_weight"):
        fitted(metric, SCORES[:2], LABELS[:2], LABELS, weighted=True)


def test_a_class_that_is_neither_there_nor_predicted_counts_in_no_mean() -> None:
    targets = SKEWED.clamp(max=1)
    found = figures(targets, LOGITS.clone().index_fill_(1, torch.tensor([3]), -99.0), "f1,auc", classes=9)
    probabilities = LOGITS.clone().index_fill_(1, torch.tensor([3]), -99.0)
    wanted = sk.f1_score(targets, probabilities.argmax(1), average="macro")
    assert found["f1"] == pytest.approx(wanted, rel=1e-12)
    areas = [sk.roc_auc_score(targets == k, probabilities.softmax(1)[:, k]) for k in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(areas), rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_metrics_of_amounts_are_those_of_scikit_learn(ranks: int) -> None:
    wanted = 1e6 + torch.randn(60, 2, dtype=torch.float64, generator=RANDOM)
    guesses = wanted + 0.3 * LOGITS[:, :2]
    found = figures(wanted, guesses, "auto", ranks=ranks)
    assert found["r2"] == pytest.approx(sk.r2_score(wanted, guesses), rel=1e-9)
    assert found["rmse"] == pytest.approx(sk.mean_squared_error(wanted, guesses) ** 0.5, rel=1e-12)
    equal = torch.full((6, 1), 0.5, dtype=torch.float64)
    assert figures(equal, equal, "r2", "mse", ranks) == {"r2": 1.0}
    assert figures(equal, equal + 0.1, "r2", "mse", ranks) == {"r2": 0.0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_functions_of_scikit_learn_get_everything_at_once(ranks: int) -> None:
    def spread(targets, outputs):
        assert isinstance(outputs, np.ndarray)
        assert outputs.shape == (len(targets), 4)
        return outputs.std()

    coefficient = "sklearn.metrics:matthews_corrcoef"
    names = f"{coefficient},sklearn.metrics:log_loss,sklearn.metrics:cohen_kappa_score"
    found = figures(SKEWED, LOGITS, names, ranks=ranks, classes=4)
    assert found["cohen_kappa_score"] == pytest.approx(sk.cohen_kappa_score(SKEWED, LOGITS.argmax(1)))
    assert found["matthews_corrcoef"] == pytest.approx(sk.matthews_corrcoef(SKEWED, LOGITS.argmax(1)))
    data = replace(data_set(SKEWED), classes=4)
    area, distance, own = named_metrics(
        ["sklearn.metrics:roc_auc_score", "sklearn.metrics:max_error", spread], named_loss("auto", data), data
    )
    assert (area.better, distance.better, own.better) == ("higher", "lower", None)
    assert figures(SKEWED, LOGITS, [own], ranks=ranks)["spread"] == pytest.approx(float(LOGITS.numpy().std()))
    with pytest.raises(BadOption, match=r"'roc_auc_score' cannot be computed .* multi_class"):
        fitted(area, LOGITS, SKEWED, SKEWED)
    amounts = figures(LOGITS[:, 0], LOGITS[:, 1:2], "sklearn.metrics:max_error", ranks=ranks)
    assert amounts["max_error"] == sk.max_error(LOGITS[:, 0], LOGITS[:, 1])


@pytest.mark.parametrize("name", ["f1", "auc", "top3", "balanced_accuracy"])
def test_metrics_of_classes_are_refused_for_amounts(name: str) -> None:
    with pytest.raises(BadOption, match=f"metric '{name}' is for classes"):
        names(name, "mse", torch.tensor([0.5, 2.0]))
    with pytest.raises(BadOption, match="metric 'r2' is for regression, but the targets are classes"):
        names("r2", "auto", LABELS)


def tally_of(*metrics: str, classes: int | None = None) -> Tally:
    return Tally(Objective(LOSSES["cross_entropy"], [METRICS[name] for name in metrics], classes))


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_a_tally_does_not_depend_on_how_samples_are_batched(batch: int) -> None:
    tally = tally_of("accuracy", classes=10)
    for scores, labels in zip(SCORES.split(batch), LABELS.split(batch), strict=True):
        tally.add(2.0, scores, labels)
    evaluation = tally.here()
    assert evaluation.samples == 500
    assert evaluation.loss == 2.0
    assert evaluation.metrics["accuracy"] == accuracy_score(LABELS, SCORES.argmax(1))
    assert evaluation.confusion == confusion_matrix(LABELS, SCORES.argmax(1)).tolist()


def test_predictions_of_no_known_class_have_their_own_column() -> None:
    tally = tally_of(classes=2)
    tally.add(0.0, torch.eye(4), torch.tensor([0, 1, 0, 1]))
    assert tally.here().confusion == [[1, 0, 1], [0, 1, 1]]


def test_a_first_batch_without_labels_fits_every_metric() -> None:
    auc = METRICS["auc"]
    assert fitted(auc, SCORES[:0], LABELS[:0], LABELS) is auc
