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
    of_net,
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
def unfreezing(job: Job) -> Outcome:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer)
    model[0].requires_grad_(True)
    train(job, model, optimizer)
    return weights(model)


@of_net(sgd)
def a_new_optimizer_for_the_same_model(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """As in fine-tuning: first SGD, then Adam over the head alone."""
    train(job, model, optimizer)
    model[0].requires_grad_(False)
    model, optimizer = job.distribute(model, torch.optim.Adam(model[2].parameters(), lr=0.01))
    train(job, model, optimizer)


class _Weighted(nn.Module):
    """A weight of the loss, with the model beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))


@loop
def a_weight_of_the_loss_that_is_trained(job: Job) -> Outcome:
    """The loop calls the model, which is a part of what is distributed."""
    model = net()
    both = _Weighted(model)
    _, optimizer = job.distribute(both, adam(both))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        loss = fit(model, inputs, targets) * torch.exp(-both.weight) + both.weight
        loss.backward()
        optimizer.step()
    return weights(both)
