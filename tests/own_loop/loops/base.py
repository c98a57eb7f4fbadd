"""What the loops are made of: data, small models, and the table of them.

A loop is a function of a `Job`; it shows one thing that tutti must not change, and returns what it ended
with.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.jobs import Job, Loop, Outcome

LOOPS: dict[str, Loop] = {}

FEATURES, CLASSES = 5, 3


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def samples(count: int = 11, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def batches(size: int = 4, count: int = 11, seed: int = 1) -> DataLoader:
    """By default of 4, 4 and 3 samples: uneven on two ranks and on three."""
    return DataLoader(samples(count, seed), size)


def net(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def fit(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def weights(*models: nn.Module) -> list[dict[str, Tensor]]:
    return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


@contextmanager
def children_allowed() -> Iterator[None]:
    """The ranks of a test are daemons, which multiprocessing lets have no children."""
    config = multiprocessing.current_process()._config
    kept = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = kept


Body: TypeAlias = Callable[[Job, nn.Sequential, Optimizer], Outcome]


def of_net(make: Callable[[nn.Module], Optimizer]) -> Callable[[Body], Body]:
    """Name a loop over `net()` and its optimizer; it ends with the weights and what the function returns."""

    def named(body: Body) -> Body:
        LOOPS[body.__name__] = partial(_with_net, make=make, body=body)
        return body

    return named


def _with_net(job: Job, make: Callable[[nn.Module], Optimizer], body: Body) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, make(model))
    found = body(job, model, optimizer)
    return weights(model), found


def train(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    of: Iterable[Any] | None = None,
    epochs: int = 1,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    of = batches() if of is None else of
    for _ in range(epochs):
        for inputs, targets in job.shard(of):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            before_step()
            optimizer.step()
            after_step()
