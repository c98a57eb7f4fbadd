"""Losses that are divided by something else than the number of their samples."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import CLASSES, FEATURES, batches, loop, net, sgd, weights

OF_CLASSES = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


@loop
def labels_that_are_ignored(job: Job) -> Outcome:
    """The last batch has one sample: some ranks have none of it."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model), reduction="sum")
    for inputs, targets in job.shard(batches(size=5)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=0, reduction="sum")
        (loss / job.total((targets != 0).sum())).backward()
        optimizer.step()
    return weights(model)


@loop
def a_mean_over_tokens(job: Job) -> Outcome:
    """Sequences of different lengths, and gradients that are added up over two batches."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model), reduction="sum")
    inputs = torch.linspace(-1, 1, 8 * 4 * FEATURES, dtype=torch.float64).sin().view(8, 4, FEATURES)
    lengths = torch.tensor([4, 1, 1, 2, 4, 3, 1, 1])
    labels = torch.arange(32).view(8, 4) % CLASSES
    for number, (tokens, targets, ends) in enumerate(
        job.shard(DataLoader(TensorDataset(inputs, labels, lengths), 3))
    ):
        there = torch.arange(4) < ends.view(-1, 1)
        (_each(model, tokens, targets)[there].sum() / job.total(there.sum())).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return weights(model)


def _search(job: Job, size: int, of_several: bool) -> Outcome:
    """Sums over the labels that are there, whose loss a line search goes by."""
    model = net()
    optimizer: Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer = job.distribute(model, optimizer, reduction="sum")
    loader = batches(size)

    def closure(of: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        optimizer.zero_grad()
        whole = torch.zeros((), dtype=torch.float64)
        for inputs, targets in of:
            loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=0, reduction="sum")
            loss = loss / job.total((targets != 0).sum())
            loss.backward()
            whole += loss.detach()
        return whole

    if of_several:
        losses = [optimizer.step(lambda: closure(job.shard(loader)))]
    else:
        losses = [optimizer.step(partial(closure, [batch])) for batch in job.shard(loader)]
    return weights(model), losses


@loop
def a_line_search_by_sums(job: Job) -> Outcome:
    """The last batch has one sample: some ranks have none of it."""
    return _search(job, 5, of_several=False)


def _each(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
