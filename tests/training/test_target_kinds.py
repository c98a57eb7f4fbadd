"""What targets are taken for, and what is asked or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.data import DataSet, Part
from tutti.errors import BadData, BadOption
from tutti.training.losses import named_loss
from tutti.training.target_kinds import loss_for


def take(loss: str, targets: Tensor) -> None:
    """Choose a loss for a data set with these targets."""
    named_loss(loss, DataSet("some", Part(targets, targets), None, None, None, ()))


@pytest.mark.parametrize(
    ("targets", "loss"),
    [
        (torch.tensor([0, 1, 2]), "cross_entropy"),
        (torch.tensor([0.5, 1.5, 0.0]), "mse"),
        (torch.tensor([[0.2, 0.3], [0.7, 0.3]]), "mse"),
        (torch.tensor([0.0, 2.0, 3.0]), "mse"),
        (torch.zeros(3), "mse"),
    ],
)
def test_the_loss_follows_targets_that_mean_one_thing(targets: Tensor, loss: str) -> None:
    assert loss_for(targets) == loss


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (torch.tensor([0.0, 1.0, 1.0]), ["--loss bce", "--data.classes 2"]),
        (torch.tensor([[0.0], [1.0]]), ["--loss bce", "--data.classes 2"]),
        (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), ["--loss bce", "--data.classes 2"]),
        (torch.tensor([[0.2, 0.8], [0.5, 0.5]]), ["--loss cross_entropy"]),
        (torch.tensor([0.0, 1.0, 2.0]), ["--data.classes 3"]),
        (torch.tensor([1.0, 2.0, 3.0]), ["--data.classes 4"]),
        (torch.tensor([[0.0, 1.0], [2.0, 2.0]]), ["--data.classes 3"]),
        (torch.tensor([-1.0, 1.0, 1.0]), ["0 and 1"]),
    ],
)
def test_targets_that_may_mean_several_things_are_asked_about(targets: Tensor, options: list[str]) -> None:
    with pytest.raises(BadOption) as asked:
        loss_for(targets)
    assert all(option in str(asked.value) for option in [*options, "--loss mse"])


@pytest.mark.parametrize(
    ("loss", "targets", "found"),
    [
        ("bce", torch.tensor([0.0, 3.0]), "from 0 to 3"),
        ("bce", torch.tensor([-1.0, 1.0]), "from -1 to 1"),
        ("nll", torch.tensor([[0.0, 1.0]]), "class numbers"),
        ("cross_entropy", torch.tensor([0.0, 1.0]), "one number for each sample"),
        ("cross_entropy", torch.tensor([[1.0], [1.0]]), "one number for each sample"),
        ("cross_entropy", torch.tensor([[0.5, 0.5], [1.0, 1.0]]), "sample 1 do not add up to 1"),
        ("cross_entropy", torch.tensor([[0.5, 0.5], [1.5, -0.5]]), "sample 1 has one below 0"),
        ("cross_entropy", torch.tensor([[[0.5, 0.5], [0.5, 0.6]]]), "sample 0 do not add up to 1"),
    ],
)
def test_floats_that_a_loss_does_not_take_are_refused(loss: str, targets: Tensor, found: str) -> None:
    with pytest.raises(BadData, match=found):
        take(loss, targets)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("bce", torch.tensor([0.0, 0.3, 1.0])),
        ("cross_entropy", torch.tensor([[0.3, 0.7], [1.0, 0.0]])),
        ("cross_entropy", torch.tensor([[[0.3, 0.6], [0.7, 0.4]]])),
        ("mse", torch.tensor([-5.0, 5.0])),
        ("torch.nn.functional:mse_loss", torch.tensor([-5.0, 5.0])),
    ],
)
def test_floats_that_a_loss_takes_pass(loss: str, targets: Tensor) -> None:
    take(loss, targets)
