"""`solo` is sequential training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.strategies.sequential import Case, by_strategy, distance, sequential
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Solo


def mlp(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 37), nn.Tanh(), nn.Linear(37, 5)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.05), Clip(value=0.01)], ids=str)
@pytest.mark.parametrize("made", [optim.SGD, optim.AdamW, optim.RMSprop, optim.Adafactor])
def test_one_worker_equals_plain_torch(
    made: type[optim.Optimizer], clip: Clip, dtype: torch.dtype, tolerance: float
) -> None:
    case = Case(partial(mlp, dtype), lambda m: made(m.parameters(), lr=0.01), 20, clip, dtype=dtype)
    (found,) = VirtualWorld(1).run(by_strategy, case, Solo())
    assert distance(found, sequential(case)) < tolerance


def test_a_second_worker_is_refused() -> None:
    with pytest.raises(BadOption, match="runs on 1 worker, not 2; use '-n 1' or '--strategy sync'"):
        Solo().check(2)
