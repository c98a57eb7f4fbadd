"""Batches of other structures than pairs, and loaders that do more than load."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import fit, loop, net, of_net, samples, sgd, train, weights


class Encoding(UserDict[str, Tensor]):
    """A mapping that is no dict, as collators of Hugging Face make them."""


def _trained(
    job: Job, made: Callable[[Tensor, Tensor], Any], apart: Callable[[Any], tuple[Tensor, Tensor]]
) -> Outcome:
    """Train on a loader's batches and on a list of them, and evaluate: the last one has a single sample."""

    def collate(items: list[tuple[Tensor, Tensor]]) -> Any:
        return made(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))

    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    loader = DataLoader(samples(9), 4, collate_fn=collate)
    for some in (loader, list(loader)):
        for batch in job.shard(some):
            optimizer.zero_grad()
            fit(model, *apart(batch)).backward()
            optimizer.step()
    right = torch.tensor(0)
    with torch.no_grad():
        for some in (loader, list(loader)):
            for batch in job.shard(some):
                assert type(batch) is type(made(*samples()[:2]))
                inputs, targets = apart(batch)
                right += (model(inputs).argmax(1) == targets).sum()
    return [weights(model), job.total(right)]


@loop
def batches_of_a_mapping(job: Job) -> Outcome:
    return _trained(job, lambda x, y: Encoding(x=x, y=y), lambda batch: (batch["x"], batch["y"]))


@loop
def batches_of_arrays(job: Job) -> Outcome:
    def apart(batch: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])

    return _trained(job, lambda x, y: {"x": x.numpy(), "y": y.numpy()}, apart)


class Doubling(DataLoader[Any]):
    """Changes its batches as they come."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for inputs, targets in super().__iter__():
            yield 2 * inputs, targets


@of_net(sgd)
def a_loader_that_changes_its_batches(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    train(job, model, optimizer, Doubling(samples(), 4))
