"""Weights from a file, and those of a trained copy."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import BadModel
from tutti.training.weights import bring_back


class Slashed(nn.Module):
    """Names its parameters as Keras does: by the model's own name too, which a copy has not.

    Args:
        name: of the model.
        widths: of inputs, hidden layer and outputs.
    """

    def __init__(self, name: str = "sequential/", widths: tuple[int, int, int] = (6, 8, 3)) -> None:
        super().__init__()
        torch.manual_seed(4)
        ins, hidden, outs = widths
        shapes = {"dense/bias": (hidden,), "dense/kernel": (ins, hidden), "dense_1/kernel": (hidden, outs)}
        self.held = nn.ParameterDict({name + key: torch.randn(shape) for key, shape in shapes.items()})

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (list(self.held.values()),)

    def forward(self, x: Tensor) -> Tensor:
        bias, kernel, last = self.held.values()
        return torch.tanh(x @ kernel + bias) @ last


def _unpickled(values: list[Tensor]) -> Slashed:
    copied = Slashed("")
    for parameter, value in zip(copied.parameters(), values, strict=True):
        parameter.data = value.data
    return copied


def test_a_copy_s_weights_find_their_places_whatever_its_names() -> None:
    model = Slashed()
    copied = pickle.loads(pickle.dumps(model))
    assert copied.state_dict().keys() != model.state_dict().keys()
    trained = {name: value + 1 for name, value in copied.state_dict().items()}
    before = [value.clone() for value in model.state_dict().values()]
    bring_back(trained, model)
    for old, new in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(new, old + 1)


def test_names_decide_before_their_order_does() -> None:
    """Keras sorts parameters by their names, of which some have the name of the model and others have not."""
    held = {
        name: torch.randn(2) for name in ("seed/kernel", "sequential/conv/kernel", "sequential/dense/kernel")
    }
    model = nn.Module()
    model.held = nn.ParameterDict(held)
    trained = {
        f"held.{name}": torch.full((2,), float(i))
        for i, name in enumerate(("conv/kernel", "dense/kernel", "seed/kernel"))
    }
    bring_back(trained, model)
    assert [value[0].item() for value in model.held.values()] == [2, 0, 1]


@pytest.mark.parametrize(
    "weights",
    [
        {"held.dense/bias": torch.zeros(8)},
        Slashed("", (6, 7, 3)).state_dict(),
        dict(zip(("a/one", "a/two", "b/three"), Slashed().state_dict().values(), strict=True)),
    ],
)
def test_weights_of_something_else_are_no_copy(weights: dict[str, Tensor]) -> None:
    with pytest.raises(BadModel, match="had other parameters than the model itself"):
        bring_back(weights, Slashed())
