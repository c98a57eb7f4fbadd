"""Optimizers by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from tutti.errors import BadOption, UnknownName
from tutti.optim.named import build


class Halving(optim.SGD):
    """An optimizer of a user's own."""


def not_a_class() -> None:
    """Something else than an optimizer."""


def one_parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize("name", ["adam", "Adam", "ADAM"])
def test_names_are_torchs_in_any_case(name: str) -> None:
    assert type(build(name, one_parameter())) is optim.Adam


def test_the_rate_and_the_options_are_set() -> None:
    (group,) = build("adam", one_parameter(), 0.5, {"betas": [0.8, 0.9], "amsgrad": True}).param_groups
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.5, (0.8, 0.9), True)


def test_an_optimizer_of_the_users_own_is_named_by_its_module() -> None:
    assert type(build("tests.optim.test_named:Halving", one_parameter(), 0.1)).__name__ == "Halving"


@pytest.mark.parametrize(
    ("name", "lr", "options", "error", "message"),
    [
        ("adamm", None, {}, UnknownName, "unknown optimizer 'adamm'; did you mean 'adam'"),
        ("sgd", None, {"momentm": 0.9}, UnknownName, "did you mean 'momentum'"),
        ("sgd", -1.0, {}, BadOption, "cannot be made with lr=-1.0: Invalid learning rate: -1.0"),
        ("adam", None, {"betas": 3}, BadOption, "cannot be made with betas=3"),
        ("sgd", None, {"nesterov": True}, BadOption, "Nesterov momentum requires a momentum"),
        ("adam", None, {"lr": 0.1}, BadOption, "use --lr"),
        ("lbfgs", None, {}, BadOption, "calls the model several times for one update; use another"),
        ("SparseAdam", None, {}, BadOption, "takes only sparse gradients"),
        ("tests.optim.test_named:not_a_class", None, {}, BadOption, "a subclass of torch.optim.Optimizer"),
    ],
)
def test_wrong_optimizers_are_refused(
    name: str, lr: float | None, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(name, one_parameter(), lr, options)


def test_every_proposed_optimizer_can_be_built() -> None:
    with pytest.raises(UnknownName) as refused:
        build("no-such", one_parameter())
    assert "lars" in refused.value.known
    assert "lbfgs" not in refused.value.known
    for name in refused.value.known:
        build(name, one_parameter())
