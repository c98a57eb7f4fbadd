"""Tests of the objects that a farm is begun with."""

from __future__ import annotations

import cloudpickle
import torch
from torch import nn

from tutti.run.pickled import Pickled
from tutti.studies.given_weights import numbers_given


def _pickled(value: object) -> dict[str, Pickled]:
    return {"model m": Pickled.of(value, cloudpickle.Pickler)}


def _module(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)


def test_modules_are_told_by_their_weights() -> None:
    same = numbers_given(_pickled(_module(0)))
    assert same == numbers_given(_pickled(_module(0)))
    assert list(same) == ["given model m"]
    other = _module(0)
    other[1] = nn.Dropout(0.1)  # type: ignore[index]
    said = [numbers_given(_pickled(one)) for one in (_module(1), _module(0, torch.bfloat16), other)]
    assert len({one["given model m"] for one in [same, *said]}) == 4
