"""Models taken apart and put together again."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from tutti.sklearn.pickled_module import PickledModule


class Tied(nn.Module):
    """Layers of all sorts, with a tensor that is there twice and numbers that NumPy does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm, self.memory = nn.BatchNorm1d(3), nn.LSTM(3, 2)
        self.register_buffer("once", torch.arange(3), persistent=False)
        self.twice = self.once
        self.short = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.memory(self.norm(self.second(self.first(inputs))) + self.once)[0]
        return found * self.short.float()


def test_a_model_comes_back_with_all_that_it_has() -> None:
    torch.manual_seed(0)
    module, inputs = Tied(), torch.randn(5, 3)
    module(inputs)
    apart = PickledModule.of(module)
    back = pickle.loads(pickle.dumps(apart)).load()
    assert isinstance(back, Tied)
    assert back.second.weight is back.first.weight
    assert back.once is back.twice
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in module.parameters()]
    for name, value in module.state_dict().items():
        assert torch.equal(value, back.state_dict()[name])
    assert torch.equal(module.eval()(inputs), back.eval()(inputs))


def test_its_numbers_are_arrays_and_a_copy_has_its_own() -> None:
    module = nn.Linear(300, 200)
    apart = PickledModule.of(module)
    assert [array.shape for array in apart.arrays] == [(200, 300), (200,)]
    assert len(apart.structure) < 5000
    back = apart.load()
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.zero_()
    assert all(array.any() for array in apart.arrays)
    assert all(parameter.any() for parameter in module.parameters())
