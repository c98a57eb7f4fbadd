"""How gradients are forgotten, and how many backward passes a step has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import (
    adam,
    batches,
    children_allowed,
    fit,
    gradients,
    loop,
    net,
    samples,
    sgd,
    train,
    weights,
)


@loop
def the_usual_loop(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer)
    return weights(model)


@loop
def gradients_are_never_zeroed(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model), gradients(model)


@loop
def step_without_a_gradient(job: Job) -> Outcome:
    """After `zero_grad` torch's optimizers skip every parameter: not even the momentum moves it."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer, epochs=1)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.step()
    return weights(model)


@loop
def accumulation_of_uneven_micro_batches(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, targets in job.shard(batches()):
            (fit(model, inputs, targets) / 3).backward()
        optimizer.step()
    return weights(model)


@loop
def fewer_samples_than_ranks(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    for inputs, targets in job.shard(batches(size=2, count=5)):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def two_shuffled_loaders_side_by_side(job: Job) -> Outcome:
    """Both draw a random number when their iteration begins, before either draws its order."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    loaders = [job.shard(DataLoader(samples(12, seed), 6, shuffle=True)) for seed in (1, 2)]
    for (inputs, targets), (more, others) in zip(*loaders, strict=True):
        optimizer.zero_grad()
        (fit(model, inputs, targets) + fit(model, more, others)).backward()
        optimizer.step()
    return weights(model)


@loop
def one_backward_of_two_uneven_loaders(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    loaders = job.shard(batches()), job.shard(batches(count=10, seed=2))
    for (inputs, targets), (more, others) in zip(*loaders, strict=True):
        optimizer.zero_grad()
        (fit(model, inputs, targets) + fit(model, more, others)).backward()
        optimizer.step()
    return weights(model)


@loop
def one_backward_of_all_batches(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for inputs, targets in job.shard(batches()):
            loss = loss + fit(model, inputs, targets)
        loss.backward()
        optimizer.step()
    return weights(model)


@loop
def evaluation_between_backward_and_step(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        with torch.no_grad():
            for held, _ in job.shard(batches(size=2, count=5, seed=7)):
                model(held)
        optimizer.step()
    return weights(model)


@loop
def batches_that_another_thread_fetches(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    source = iter(job.shard(batches()))
    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(next, source, None).result()
        while batch is not None:
            after = thread.submit(next, source, None)
            optimizer.zero_grad()
            fit(model, *batch).backward()
            optimizer.step()
            batch = after.result()
    return weights(model)


@loop
def a_stream_that_is_left_and_gone_on_with(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    stream = (batch for _ in range(9) for batch in batches())
    for _ in range(3):
        for inputs, targets in islice(job.shard(stream), 4):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
    return weights(model)


@loop
def a_loader_inside_another(job: Job) -> Outcome:
    """As in meta-learning: inner batches are trained on between an outer batch and its backward pass."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches(size=5, count=10)):
        for more, others in job.shard(batches(size=2, count=4, seed=6)):
            optimizer.zero_grad()
            fit(model, more, others).backward()
            optimizer.step()
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def the_next_batch_is_fetched_ahead(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    source = iter(job.shard(batches()))
    ahead = next(source, None)
    while ahead is not None:
        inputs, targets = ahead
        ahead = next(source, None)
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def batches_that_are_kept(job: Job) -> Outcome:
    """All batches are of one size, so that it is no matter which was dealt last."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    kept = list(job.shard(batches(size=6, count=12)))
    for _ in range(2):
        for inputs, targets in kept:
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
    return weights(model)


@loop
def a_backward_pass_that_fails(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
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
    return weights(model), failures


def _fail_once() -> Callable[[Tensor], None]:
    calls: list[int] = []

    def hook(grad: Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError("once")

    return hook


def diffuse(job: Job, loaders: Iterable[DataLoader]) -> Outcome:
    """Langevin dynamics: the noise is that of the program's seed, as is what the loaders draw of it."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
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
    return weights(model)


@loop
def noise_on_the_weights(job: Job) -> Outcome:
    return diffuse(job, [DataLoader(samples(), 4, shuffle=True) for _ in range(2)])


def with_a_worker(job: Job, **options: Any) -> Outcome:
    loader = DataLoader(samples(), 4, shuffle=True, num_workers=1, multiprocessing_context="fork", **options)
    with children_allowed():
        return diffuse(job, [loader] * 3)


@loop
def noise_and_workers_that_live_on(job: Job) -> Outcome:
    """Such a loader draws a seed for its workers once, not in each epoch."""
    return with_a_worker(job, persistent_workers=True)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(samples())


@loop
def a_loader_of_a_stream(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(DataLoader(Stream(), 4)):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def batches_of_graphs(job: Job) -> Outcome:
    """There are more edges than nodes: cutting both by the same rule would lose some."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    nodes, targets = samples(6).tensors
    edges = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 2], [1, 3], [2, 4]])
    for inputs, labels, pairs in job.shard([(nodes, targets, edges)] * 2):
        optimizer.zero_grad()
        linked = inputs.index_add(0, pairs[:, 0], inputs[pairs[:, 1]])
        fit(model, linked, labels).backward()
        optimizer.step()
    return weights(model)
