"""What loops do with the weights, and with copies of a model."""

from __future__ import annotations

import io
import pickle

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
def weights_are_perturbed_for_the_gradient(job: Job) -> Outcome:
    """Sharpness-aware minimization, written out."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        away = [0.05 * p.grad / (p.grad.norm() + 1e-3) for p in model.parameters()]
        with torch.no_grad():
            for parameter, offset in zip(model.parameters(), away, strict=True):
                parameter.add_(offset)
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        with torch.no_grad():
            for parameter, offset in zip(model.parameters(), away, strict=True):
                parameter.sub_(offset)
        optimizer.step()
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
def a_model_that_is_pickled(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer, epochs=1)
    loaded = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    train(job, model, optimizer, epochs=1)
    return weights(model, loaded, torch.load(file, weights_only=False))


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
def evaluation_with_averaged_weights(job: Job) -> Outcome:
    """The average is swapped in, evaluated, and swapped out again."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    average = [p.detach().clone() for p in model.parameters()]
    inputs, targets = samples(6, seed=9).tensors
    losses = []
    for part, labels in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, part, labels).backward()
        optimizer.step()
        with torch.no_grad():
            for held, parameter in zip(average, model.parameters(), strict=True):
                held.lerp_(parameter, 0.3)
            own = [p.clone() for p in model.parameters()]
            for held, parameter in zip(average, model.parameters(), strict=True):
                parameter.copy_(held)
            losses.append(fit(model, inputs, targets))
            for held, parameter in zip(own, model.parameters(), strict=True):
                parameter.copy_(held)
    return weights(model), average, losses


@loop
def weights_that_are_assigned(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    model.load_state_dict(net().state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(job, model, optimizer)
    return weights(model)
