"""Figures over the ranks: what they are of, and of which type."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.stepper import OwnLoop

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0], dtype=torch.float64)
"""In batches of 4 the last has one sample, of which rank 0 alone has a part."""


def _loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(VALUES), 4)


def _begin(comm: Communicator) -> None:
    distribute._loop = OwnLoop(comm)


def _figures(comm: Communicator) -> tuple[float, float, int]:
    _begin(comm)
    sum_, samples = 0.0, 0
    with torch.no_grad():
        for (values,) in distribute.shard(_loader()):
            sum_, samples = sum_ + values.sum().item(), samples + len(values)
    return distribute.total(sum_), distribute.mean(sum_ / samples), distribute.total(samples)


@pytest.mark.parametrize("size", [2, 3])
def test_figures_after_a_loop_are_those_of_all_its_batches(worlds: Worlds, size: int) -> None:
    figures = worlds.call(_figures, size)
    assert figures == [pytest.approx((511.0, 511.0 / 9, 9), rel=1e-14)] * size
    assert {type(count) for *_, count in figures} == {int}


def _one_batch(comm: Communicator, gradients: bool) -> float:
    _begin(comm)
    with nullcontext() if gradients else torch.no_grad():
        (values,) = next(iter(distribute.shard([(VALUES[:1],)])))
    return distribute.total(values.sum().item())


@pytest.mark.parametrize("gradients", [True, False], ids=["to train on", "to evaluate"])
def test_a_sample_that_stands_in_is_in_no_figure(worlds: Worlds, gradients: bool) -> None:
    assert worlds.call(lambda comm: _one_batch(comm, gradients), 2) == [1.0, 1.0]


def _inside(comm: Communicator) -> list[float]:
    _begin(comm)
    found, loader = [], _loader()
    for _ in distribute.shard(loader):
        sum_ = 0.0
        with torch.no_grad():
            for (values,) in distribute.shard(loader):
                sum_ += values.sum().item()
        found.append(distribute.total(sum_))
    return found


def test_figures_after_a_loop_inside_another_are_those_of_the_loop_inside(worlds: Worlds) -> None:
    assert worlds.call(_inside, 2) == [[511.0] * 3] * 2


@torch.no_grad()
def _prepared(batches: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[torch.Tensor]:
    for (values,) in distribute.shard(batches):
        yield values / 2


def _trained_on_prepared(comm: Communicator) -> str:
    model: torch.nn.Module = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = distribute.distribute(model, optimizer)
    try:
        for values in _prepared(_loader()):
            model(values[:, None]).square().mean().backward()
    except BadOption as error:
        return str(error)
    return ""


def test_backward_on_batches_that_were_dealt_to_evaluate_is_refused(worlds: Worlds) -> None:
    assert all("under torch.no_grad()" in said for said in worlds.call(_trained_on_prepared, 2))


def _lengths(comm: Communicator) -> list[int]:
    """Of a rank's part of two samples, dealt from a loader and from a list, to train on and to evaluate."""
    _begin(comm)
    found = []
    for gradients in (True, False):
        with nullcontext() if gradients else torch.no_grad():
            for batches in (DataLoader(TensorDataset(VALUES[:2]), 2), [(VALUES[:2],)]):
                found += [len(values) for (values,) in distribute.shard(batches)]
    return found


def test_one_sample_stands_in_where_a_rank_that_trains_has_none(worlds: Worlds) -> None:
    assert worlds.call(_lengths, 3) == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


def _of_integers(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    _begin(comm)
    return distribute.mean(torch.tensor(comm.rank)), distribute.total(torch.tensor(True))


def test_a_mean_of_integers_has_a_fraction_and_truth_values_are_counted(worlds: Worlds) -> None:
    for mean, total in worlds.call(_of_integers, 2):
        assert mean.item() == 0.5
        assert total.item() == 2
        assert total.dtype == torch.int64


def _of_a_loss(comm: Communicator) -> list[float]:
    _begin(comm)
    loss = torch.tensor(comm.rank + 1.0, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (values,) = next(iter(distribute.shard([(VALUES[:2],)])))
        assert len(values)
        return [distribute.mean(loss).item(), distribute.total(loss).item()]


def test_a_figure_may_have_a_gradient(worlds: Worlds) -> None:
    assert worlds.call(_of_a_loss, 2) == [[1.5, 3.0]] * 2
