"""How gradients are forgotten, and how many backward passes a step has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import (
    adam,
    batches,
    children_allowed,
    fit,
    gradients,
    of_net,
    samples,
    sgd,
    train,
)


@of_net(sgd)
def the_usual_loop(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    train(job, model, optimizer, epochs=2)


@of_net(sgd)
def gradients_are_never_zeroed(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    for inputs, targets in job.shard(batches()):
        fit(model, inputs, targets).backward()
        optimizer.step()
    return gradients(model)


@of_net(sgd)
def step_without_a_gradient(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """After `zero_grad` torch's optimizers skip every parameter: not even the momentum moves it."""
    train(job, model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.step()


@of_net(sgd)
def accumulation_of_uneven_micro_batches(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, targets in job.shard(batches()):
            (fit(model, inputs, targets) / 3).backward()
        optimizer.step()


@of_net(adam)
def fewer_samples_than_ranks(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    train(job, model, optimizer, batches(size=2, count=5))


def _side_by_side(job: Job, model: nn.Module, optimizer: Optimizer, *loaders: DataLoader) -> None:
    """Make one backward pass of a batch of each loader."""
    for (inputs, targets), (more, others) in zip(*map(job.shard, loaders), strict=True):
        optimizer.zero_grad()
        (fit(model, inputs, targets) + fit(model, more, others)).backward()
        optimizer.step()


@of_net(sgd)
def two_shuffled_loaders_side_by_side(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """Both draw a random number when their iteration begins, before either draws its order."""
    loaders = (DataLoader(samples(12, seed), 6, shuffle=True) for seed in (1, 2))
    _side_by_side(job, model, optimizer, *loaders)


@of_net(sgd)
def one_backward_of_two_uneven_loaders(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    _side_by_side(job, model, optimizer, batches(), batches(count=10, seed=2))


@of_net(sgd)
def one_backward_of_all_batches(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for inputs, targets in job.shard(batches()):
            loss = loss + fit(model, inputs, targets)
        loss.backward()
        optimizer.step()


@of_net(sgd)
def evaluation_between_backward_and_step(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    @torch.no_grad()
    def evaluate() -> None:
        for held, _ in job.shard(batches(size=2, count=5, seed=7)):
            model(held)

    train(job, model, optimizer, before_step=evaluate)


@of_net(sgd)
def batches_that_another_thread_fetches(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    source = iter(job.shard(batches()))
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(next, source, None).result()
        while batch is not None:
            after = thread.submit(next, source, None)
            optimizer.zero_grad()
            fit(model, *batch).backward()
            optimizer.step()
            batch = after.result()


@of_net(sgd)
def a_stream_that_is_left_and_gone_on_with(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    stream = (batch for _ in range(9) for batch in batches())
    for _ in range(3):
        for inputs, targets in islice(job.shard(stream), 4):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()


@of_net(sgd)
def a_loader_inside_another(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """As in meta-learning: inner batches are trained on between an outer batch and its backward pass."""
    for inputs, targets in job.shard(batches(size=5, count=10)):
        train(job, model, optimizer, batches(size=2, count=4, seed=6))
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()


@of_net(sgd)
def the_next_batch_is_fetched_ahead(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    source = iter(job.shard(batches()))
    ahead = next(source, None)
    while ahead is not None:
        inputs, targets = ahead
        ahead = next(source, None)
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()


@of_net(sgd)
def batches_that_are_kept(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """All batches are of one size, so that it is no matter which was dealt last."""
    kept = list(job.shard(batches(size=6, count=12)))
    for inputs, targets in kept * 2:
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()


@of_net(sgd)
def a_backward_pass_that_fails(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    failures = 0
    for number, (inputs, targets) in enumerate(job.shard(batches())):
        optimizer.zero_grad()
        loss = fit(model, inputs, targets)
        if number == 1:
            model[2].weight.register_hook(_fail_once())
        try:
            loss.backward()
        except ArithmeticError:
            failures += 1
            continue
        optimizer.step()
    return failures


def _fail_once() -> Callable[[Tensor], None]:
    calls: list[int] = []

    def hook(grad: Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError("once")

    return hook


def _diffuse(job: Job, model: nn.Module, optimizer: Optimizer, loaders: Iterable[DataLoader]) -> None:
    """Langevin dynamics: the noise is that of the program's seed, as is what the loaders draw of it."""
    torch.manual_seed(5)
    for loader in loaders:
        for number, (inputs, targets) in enumerate(job.shard(loader)):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            if number == 1:
                break


@of_net(sgd)
def noise_on_the_weights(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    _diffuse(job, model, optimizer, [DataLoader(samples(), 4, shuffle=True) for _ in range(2)])


@of_net(sgd)
def noise_and_workers_that_live_on(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """Such a loader draws a seed for its workers once, not in each epoch."""
    by = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    with children_allowed():
        _diffuse(job, model, optimizer, [DataLoader(samples(), 4, shuffle=True, **by)] * 3)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(samples())


@of_net(sgd)
def a_loader_of_a_stream(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    train(job, model, optimizer, DataLoader(Stream(), 4))


@of_net(sgd)
def batches_of_graphs(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """There are more edges than nodes: cutting both by the same rule would lose some."""
    nodes, targets = samples(6).tensors
    edges = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 2], [1, 3], [2, 4]])
    for inputs, labels, pairs in job.shard([(nodes, targets, edges)] * 2):
        optimizer.zero_grad()
        linked = inputs.index_add(0, pairs[:, 0], inputs[pairs[:, 1]])
        fit(model, linked, labels).backward()
        optimizer.step()
