"""Several models, several optimizers, and parameters that come and go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import (
    CLASSES,
    FEATURES,
    adam,
    batches,
    fit,
    gradients,
    loop,
    net,
    samples,
    sgd,
    train,
    weights,
)


def _adversaries(job: Job, make: Callable[[nn.Module], Optimizer], zero: str) -> Outcome:
    torch.manual_seed(3)
    maker, judge = nn.Linear(2, FEATURES).double(), net(4)
    maker, moves_maker = job.distribute(maker, make(maker))
    judge, moves_judge = job.distribute(judge, make(judge))
    noise = torch.randn(11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for real, seeds in job.shard(DataLoader(TensorDataset(samples().tensors[0], noise), 4)):
        (judge if zero == "model" else moves_judge).zero_grad()
        (judge(maker(seeds).detach()).mean() - judge(real).square().mean()).backward()
        moves_judge.step()
        (maker if zero == "model" else moves_maker).zero_grad()
        (-judge(maker(seeds)).mean()).backward()
        moves_maker.step()
    return weights(maker, judge), gradients(judge)


@loop
def adversaries_zeroed_by_optimizer(job: Job) -> Outcome:
    return _adversaries(job, adam, "optimizer")


@loop
def adversaries_zeroed_by_model(job: Job) -> Outcome:
    return _adversaries(job, sgd, "model")


@loop
def adversaries_with_a_shared_loss(job: Job) -> Outcome:
    """One backward pass through both models, two steps; the judge steps twice as often."""
    maker, judge = net(3), nn.Sequential(nn.Linear(CLASSES, 1)).double()
    maker, first = job.distribute(maker, sgd(maker))
    judge, second = job.distribute(judge, adam(judge))
    for number, (inputs, _) in enumerate(job.shard(batches())):
        first.zero_grad()
        second.zero_grad()
        judge(maker(inputs)).square().mean().backward()
        second.step()
        if number % 2:
            first.step()
    return weights(maker, judge)


@loop
def two_optimizers_of_one_model(job: Job) -> Outcome:
    model = net()
    model, first = job.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    model, second = job.distribute(model, torch.optim.Adam(model[2].parameters(), lr=0.01))
    for inputs, targets in job.shard(batches()):
        first.zero_grad()
        second.zero_grad()
        fit(model, inputs, targets).backward()
        first.step()
        second.step()
    return weights(model)


@loop
def an_optimizer_of_some_parameters(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, torch.optim.Adam(model[2].parameters(), lr=0.01))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model), gradients(model)


@loop
def a_frozen_body(job: Job) -> Outcome:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer)
    return weights(model)


@loop
def unfreezing(job: Job) -> Outcome:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer, epochs=1)
    model[0].requires_grad_(True)
    train(job, model, optimizer, epochs=1)
    return weights(model)


@loop
def freezing(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    train(job, model, optimizer, epochs=1)
    model[0].requires_grad_(False)
    train(job, model, optimizer, epochs=1)
    model[0].requires_grad_(True)
    train(job, model, optimizer, epochs=1)
    return weights(model)


@loop
def a_group_added_later(job: Job) -> Outcome:
    model = net()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
    model, optimizer = job.distribute(model, optimizer)
    train(job, model, optimizer, epochs=1)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})
    train(job, model, optimizer, epochs=1)
    return weights(model), dict(optimizer.state_dict())


@loop
def a_frozen_group_added_later(job: Job) -> Outcome:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = job.distribute(model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5))
    train(job, model, optimizer, epochs=1)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
    train(job, model, optimizer, epochs=1)
    return weights(model)
