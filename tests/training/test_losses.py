"""Losses by name, and outputs that do not fit them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils import class_weight
from torch import Tensor, nn
from torch.nn import functional

from tutti.data.parts import DataSet, Part
from tutti.errors import BadData, BadOption, UnknownName, UserError
from tutti.training.losses import check_labels, named_loss
from tutti.training.targets import loss_for

LABELS = torch.tensor([0, 2, 1, 2])
SCORES = torch.tensor([[2.0, 0.1, 0.3], [0.2, 0.4, 0.1], [1.0, 1.5, 0.0], [0.0, 0.0, 3.0]])


def data_set(targets: Tensor, classes: int | None = None) -> DataSet:
    part = Part(torch.zeros(len(targets), 2), targets)
    return DataSet("made up", part, None, None, classes, ())


CLASSES = data_set(LABELS, 3)
NUMBERS = data_set(torch.randn(4))


def test_auto_is_cross_entropy_for_labels_and_mse_for_numbers() -> None:
    assert named_loss("auto", CLASSES).name == "cross_entropy"
    assert named_loss("auto", NUMBERS).name == "mse"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mse", functional.mse_loss),
        ("l1", functional.l1_loss),
        ("bce", functional.binary_cross_entropy_with_logits),
    ],
)
def test_elementwise_losses_never_broadcast_a_column_against_a_row(name: str, function) -> None:
    outputs, targets = torch.randn(4, 1), torch.rand(4)
    found = named_loss(name, data_set(targets))(outputs, targets)
    torch.testing.assert_close(found, function(outputs[:, 0], targets))


def test_elementwise_losses_take_labels_one_hot() -> None:
    found = named_loss("mse", CLASSES)(SCORES, LABELS)
    torch.testing.assert_close(found, functional.mse_loss(SCORES, functional.one_hot(LABELS, 3).float()))


def test_a_loss_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(outputs, targets):\n    return (outputs[:, 0] / 2).mean()\n")
    loss = named_loss(f"{tmp_path}/mine.py:half", CLASSES)
    assert loss(SCORES, LABELS).item() == pytest.approx(0.4)


def test_a_module_and_a_loss_for_each_sample_are_losses_too() -> None:
    expected = functional.cross_entropy(SCORES, LABELS)
    assert torch.equal(named_loss(nn.CrossEntropyLoss(), CLASSES)(SCORES, LABELS), expected)
    torch.testing.assert_close(
        named_loss(nn.CrossEntropyLoss(reduction="none"), CLASSES)(SCORES, LABELS), expected
    )


def test_a_loss_that_is_a_sum_is_refused() -> None:
    with pytest.raises(BadOption, match="is a sum"):
        named_loss(nn.CrossEntropyLoss(reduction="sum"), CLASSES)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 2]])
def test_labels_that_no_output_stands_for_are_refused(labels: list[int]) -> None:
    with pytest.raises(BadData, match=r"labels go from .* 3 outputs, for the labels from 0 to 2"):
        check_labels(torch.tensor(labels), 3)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 3.0])])
def test_ignored_labels_need_no_contents_to_find_the_memory_of_a_step(weight: Tensor | None) -> None:
    labels = torch.tensor([0, 7, 1, 2])
    loss = named_loss(nn.CrossEntropyLoss(weight, ignore_index=7), data_set(labels, 3))
    value = loss(SCORES.to("meta").requires_grad_(), labels.to("meta"))
    value.backward()
    assert (value.shape, loss.ignored) == ((), 7)


def test_labels_are_ignored_by_the_number_that_the_loss_says() -> None:
    check_labels(torch.tensor([0, 255]), 3, ignored=255)
    check_labels(torch.tensor([255]), 3, ignored=255)
    with pytest.raises(BadData, match="labels go from 0 to 3"):
        check_labels(torch.tensor([0, 255, 3]), 3, ignored=255)


FLAGS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])


def test_smoothing_is_that_of_torch() -> None:
    smooth = named_loss("cross_entropy", CLASSES, {"smoothing": 0.1})
    expected = functional.cross_entropy(SCORES, LABELS, label_smoothing=0.1)
    torch.testing.assert_close(smooth(SCORES, LABELS), expected)


def weighed_by(outputs: Tensor, targets: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
    weights = targets.double() ** power
    return (outputs[:, 0] * weights).sum(), weights.sum()


def test_options_of_the_user_s_loss_are_its_arguments() -> None:
    expected = functional.huber_loss(SCORES[:, 0], NUMBERS.train.targets, delta=0.3)
    found = named_loss("torch.nn:HuberLoss", NUMBERS, {"delta": 0.3})(SCORES[:, 0], NUMBERS.train.targets)
    torch.testing.assert_close(found, expected)
    total, weight = named_loss(weighed_by, CLASSES, {"power": 3.0}).function(SCORES, LABELS)
    assert (total, weight) == weighed_by(SCORES, LABELS, 3.0)
    with pytest.raises(UnknownName, match="unknown option 'powr'"):
        named_loss(weighed_by, CLASSES, {"powr": 3.0})


def test_amounts_have_the_shape_of_the_outputs_in_a_loss_of_the_user() -> None:
    outputs, targets = SCORES[:, :1], NUMBERS.train.targets
    expected = functional.mse_loss(outputs[:, 0], targets)
    torch.testing.assert_close(named_loss(torch.nn.MSELoss(), NUMBERS)(outputs, targets), expected)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    found = named_loss(
        "nll", data_set(torch.tensor([0, 2, 2, 2, 0, 2]), 4), class_weights="balanced"
    ).function
    expected = class_weight.compute_class_weight("balanced", classes=np.array([0, 2]), y=[0, 2, 2, 2, 0, 2])
    assert found.weight.tolist() == [expected[0], 1.0, expected[1], 1.0]
    # Of a fold the samples to train on are counted.
    fold = Part(torch.zeros(6, 2), torch.tensor([0, 2, 2, 2, 0, 2]), rows=torch.tensor([0, 1, 2, 3]))
    found = named_loss("nll", DataSet("fold", fold, None, None, 3, ()), class_weights="balanced").function
    assert found.weight.tolist() == [2.0, 1.0, 2 / 3]


@pytest.mark.parametrize(
    ("loss", "options", "weights", "message"),
    [
        ("cross_entropy", {"smoothin": 0.1}, None, "did you mean 'smoothing'"),
        ("mse", {"delta": 1}, None, "unknown option 'delta' of the loss 'mse'"),
        ("mse", {}, "balanced", "not for loss 'mse' here"),
        ("nll", {}, "1,2", "2 numbers, but there are 3 classes"),
        ("nll", {}, "balance", "give balanced, or one number"),
        ("nll", {}, "1,-2,3", "give balanced, or one number"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), {}, "balanced", "already has class weights"),
    ],
)
def test_options_and_weights_that_do_not_fit_are_refused(loss, options, weights, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_loss(loss, CLASSES, options, weights)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (torch.tensor([0, 1, 2]), "cross_entropy"),
        (torch.tensor([0.5, 1.5, 0.0]), "mse"),
        (torch.tensor([0.0, 2.0, 3.0]), "mse"),
        (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "bce"),
        (torch.tensor([[[0.0, 1.0]], [[1.0, 1.0]]]), "--loss bce.*--data.classes 2"),
        (torch.tensor([[0.2, 0.8], [0.5, 0.5]]), "--loss cross_entropy"),
    ],
)
def test_the_loss_follows_targets_or_is_asked_for(targets: Tensor, found: str) -> None:
    if "-" in found or " " in found:
        with pytest.raises(BadOption, match=found):
            loss_for(targets)
    else:
        assert loss_for(targets) == found


@pytest.mark.parametrize(
    ("loss", "targets", "found"),
    [
        ("bce", torch.tensor([0.0, 3.0]), "from 0 to 3"),
        ("nll", torch.tensor([[0.0, 1.0]]), "class numbers"),
        ("cross_entropy", torch.tensor([0.0, 1.0]), "one number for each sample"),
        ("cross_entropy", torch.tensor([[0.5, 0.5], [1.0, 1.0]]), "sample 1 do not add up to 1"),
        ("cross_entropy", torch.tensor([[0.5, 0.5], [1.5, -0.5]]), "sample 1 has one below 0"),
    ],
)
def test_floats_that_a_loss_does_not_take_are_refused(loss: str, targets: Tensor, found: str) -> None:
    with pytest.raises(BadData, match=found):
        named_loss(loss, data_set(targets))
    named_loss("mse", data_set(targets))
