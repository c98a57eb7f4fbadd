"""Whole models as programs, which give what the model gives, for any number of samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import BadModel
from tutti.exports.programs import PROGRAMS
from tutti.exports.programs.base import write_program

pytestmark = pytest.mark.usefixtures("nothing_beside")


class Own(nn.Module):
    """A model that looks at its inputs, or at random numbers."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.random = random

    def example(self, samples: int) -> Tensor:
        return torch.ones(samples, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.random:
            return inputs + torch.rand(3)
        return inputs * 2 if inputs.sum() > 0 else inputs


@pytest.mark.parametrize(
    ("random", "said"), [(True, "gives outputs that are off by"), (False, "cannot be written as")]
)
def test_what_computes_something_else_is_refused_and_nothing_is_left(
    tmp_path: Path, random: bool, said: str
) -> None:
    with pytest.raises(BadModel, match=said):
        write_program(tmp_path / "a.pt2", PROGRAMS["torch-export"], Own(random).eval(), {})
    assert not list(tmp_path.iterdir())
