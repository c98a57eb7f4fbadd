"""Ranks whose data sets are not the same are told so before they train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.own_loop.loops.base import fit, net, samples, sgd
from tests.own_loop.worlds import Worlds, job
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute

Make = Callable[[int], Iterable[Any]]
"""The batches that a rank gives `shard`, by the seed of its split."""


def train(comm: Communicator, make: Make, split: bool) -> str:
    """What a rank is told, and whether it has moved the weights."""
    with job(comm):
        model = net()
        model, optimizer = distribute.distribute(model, sgd(model))
        before = model[0].weight.detach().clone()
        try:
            for inputs, targets in distribute.shard(make(comm.rank if split else 1)):
                optimizer.zero_grad()
                fit(model, inputs, targets).backward()
                optimizer.step()
        except BadOption as error:
            return str(error)
        return "" if torch.equal(before, model[0].weight) else "moved"


def subset(seed: int) -> Iterable[Any]:
    return DataLoader(
        Subset(samples(), np.random.default_rng(seed).permutation(11).tolist()), 4, shuffle=True
    )


def nested(seed: int) -> Iterable[Any]:
    return DataLoader(Subset(subset(seed).dataset, range(9)), 4)  # type: ignore[attr-defined]


def longer(seed: int) -> Iterable[Any]:
    return DataLoader(Subset(samples(), range(8 + seed)), 4)


def distributed(seed: int) -> Iterable[Any]:
    return DataLoader(samples(), 4, sampler=DistributedSampler(samples(), 2, 0))


def generated(seed: int) -> Iterable[Any]:
    inputs, targets = samples().tensors
    yield inputs[: 8 + seed], targets[: 8 + seed]


@pytest.mark.parametrize("make", [subset, nested, longer, distributed, generated])
def test_ranks_with_other_samples_are_refused_before_the_first_step(worlds: Worlds, make: Make) -> None:
    for told in worlds.call(partial(train, make=make, split=True), 2):
        assert "s" in told
        assert "moved" not in told


@pytest.mark.parametrize("make", [subset, generated])
def test_ranks_with_the_same_samples_train(worlds: Worlds, make: Make) -> None:
    assert worlds.call(partial(train, make=make, split=False), 2) == ["moved", "moved"]
