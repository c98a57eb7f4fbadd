"""What loops do with the weights, and with copies of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import (
    FEATURES,
    batches,
    fit,
    loop,
    net,
    samples,
    sgd,
    train,
    weights,
)


@loop
def weights_are_scaled_in_place(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return weights(model)


@loop
def weights_of_an_average(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
        average.update_parameters(model)
    return weights(model, average)


@loop
def batch_norm_over_equal_parts(job: Job) -> Outcome:
    """Statistics are a rank's own: those of the batch where the ranks' parts have the same samples."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model, optimizer = job.distribute(model, sgd(model))
    inputs, targets = samples(4).tensors
    batch = (inputs.repeat(6, 1), targets.repeat(6))
    for _ in range(3):
        for part, labels in job.shard([batch]):
            optimizer.zero_grad()
            fit(model, part, labels).backward()
            optimizer.step()
    return weights(model), model[1].running_mean


@loop
def weights_that_are_assigned(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    model.load_state_dict(net().state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(job, model, optimizer)
    return weights(model)
