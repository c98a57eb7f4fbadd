"""Metrics: their values, and that they add up."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, mean_absolute_error, top_k_accuracy_score
from torch import Tensor

from tutti.comm.virtual.world import VirtualWorld
from tutti.data.parts import DataSet, Part
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.training.evaluation import Objective, Tally, evaluate
from tutti.training.losses import LOSSES, named_loss
from tutti.training.metrics import METRICS, named_metrics, predicted

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
    top5 = METRICS["top5"].sum(SCORES, LABELS).item() / 500
    assert top5 == pytest.approx(top_k_accuracy_score(LABELS, SCORES, k=5))
    numbers, targets = SCORES[:, :2], SCORES[:, 2:4]
    mae = METRICS["mae"].sum(numbers, targets).item() / 500
    assert mae == pytest.approx(mean_absolute_error(targets, numbers))


def test_accuracy_of_one_logit_is_whether_it_is_positive() -> None:
    outputs = torch.tensor([[1.0], [-2.0], [0.5]])
    assert METRICS["accuracy"].sum(outputs, torch.tensor([1, 0, 0])).item() == 2
    assert METRICS["accuracy"].sum(outputs[:, 0], torch.tensor([1.0, 0.0, 0.0])).item() == 2


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


def test_scores_of_several_classes_mean_the_largest_under_any_loss() -> None:
    data = data_set(LABELS)
    (metric,) = named_metrics("accuracy", named_loss("mse", data), data)
    assert metric.sum(SCORES, LABELS).item() == METRICS["accuracy"].sum(SCORES, LABELS).item()


def test_accuracy_of_maps_is_a_mean_for_each_sample() -> None:
    scores = torch.zeros(2, 3, 4, 4)
    scores[:, 1] = 1.0
    labels = torch.ones(2, 4, 4, dtype=torch.int64)
    labels[0, 0] = 2
    assert METRICS["accuracy"].sum(scores, labels).item() == 1.75
    assert predicted(scores, labels).shape == labels.shape


def test_auto_follows_targets_and_loss() -> None:
    floats = torch.randn(4)
    assert names("auto", "auto", torch.arange(4)) == ["accuracy"]
    assert names("auto", "mse", torch.arange(4)) == ["accuracy"]
    assert names("auto", "auto", floats) == ["mae"]
    assert names("auto", "bce", torch.tensor([0.0, 1.0])) == ["accuracy"]
    assert names("none", "auto", floats) == []
    assert names("accuracy, top5", "auto", torch.arange(4)) == ["accuracy", "top5"]


def test_a_callable_may_give_a_value_for_each_sample_or_their_mean() -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) != targets

    def wrong_share(outputs: Tensor, targets: Tensor) -> Tensor:
        return wrong(outputs, targets).float().mean()

    data = data_set(LABELS)
    each, mean = named_metrics([wrong, wrong_share], named_loss("auto", data), data)
    assert (each.name, mean.name) == ("wrong", "wrong_share")
    assert each.sum(SCORES, LABELS).item() == pytest.approx(mean.sum(SCORES, LABELS).item())


def test_bad_metrics_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'accuracy'"):
        names("acuracy", "auto", LABELS)
    with pytest.raises(BadOption, match="given twice"):
        names("accuracy,accuracy", "auto", LABELS)
    with pytest.raises(BadOption, match="not a function"):
        names([3], "auto", LABELS)
    data = data_set(LABELS)
    (three,) = named_metrics(lambda outputs, targets: outputs[:3, 0], named_loss("auto", data), data)
    with pytest.raises(BadModel, match="one value for each sample"):
        three.sum(SCORES, LABELS)


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


def test_looking_at_a_tally_changes_no_bit_of_its_sums() -> None:
    outputs, targets = torch.randn(500, 1, dtype=torch.float64).exp(), torch.zeros(500, 1)
    seen, unseen = tally_of("mae"), tally_of("mae")
    for batch, wanted in zip(outputs.split(7), targets.split(7), strict=True):
        seen.add(0.1, batch, wanted)
        assert seen.here().samples == seen.samples
        unseen.add(0.1, batch, wanted)
    assert seen.here() == unseen.here()


def test_a_tally_keeps_few_outputs_in_memory() -> None:
    tally = tally_of("accuracy")
    for _ in range(100):
        tally.add(0.0, torch.zeros(1000, 10), torch.zeros(1000, dtype=torch.int64))
    assert tally._pending < 1 << 17
    assert tally.here().samples == 100_000


def test_predictions_of_no_known_class_have_their_own_column() -> None:
    tally = tally_of(classes=2)
    tally.add(0.0, torch.eye(4), torch.tensor([0, 1, 0, 1]))
    assert tally.here().confusion == [[1, 0, 1], [0, 1, 1]]


def test_totals_add_up_over_ranks_even_where_one_has_nothing() -> None:
    def program(comm):
        tally = tally_of("accuracy", classes=10)
        if comm.rank:
            mine = slice((comm.rank - 1) * 250, comm.rank * 250)
            tally.add(float(comm.rank), SCORES[mine], LABELS[mine])
        return tally.total(comm)

    first, *others = VirtualWorld(ranks=3).run(program)
    assert all(other == first for other in others)
    assert (first.samples, first.loss) == (500, 1.5)
    assert first.confusion == confusion_matrix(LABELS, SCORES.argmax(1)).tolist()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("mse", torch.tensor([0.5, 2.0])),
        ("bce", torch.tensor([0.5, 0.3])),
        ("cross_entropy", torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
    ],
)
def test_accuracy_is_refused_where_there_are_no_classes(loss: str, targets: Tensor) -> None:
    assert "accuracy" not in names("auto", loss, targets)
    with pytest.raises(BadOption, match=r"--data\.classes N"):
        names("accuracy", loss, targets)
