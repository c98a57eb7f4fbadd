"""What loops do with the weights, and with copies of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import FEATURES, loop, net, of_net, samples, sgd, train, weights


@of_net(sgd)
def weights_are_scaled_in_place(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    @torch.no_grad()
    def scale() -> None:
        for parameter in model.parameters():
            parameter.mul_(0.9)

    train(job, model, optimizer, after_step=scale)


@of_net(sgd)
def weights_of_an_average(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    train(job, model, optimizer, after_step=lambda: average.update_parameters(model))
    return weights(average)


@loop
def batch_norm_over_equal_parts(job: Job) -> Outcome:
    """Statistics are a rank's own: those of the batch where the ranks' parts have the same samples."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model, optimizer = job.distribute(model, sgd(model))
    inputs, targets = samples(4).tensors
    train(job, model, optimizer, [(inputs.repeat(6, 1), targets.repeat(6))], epochs=3)
    return weights(model), model[1].running_mean


@of_net(sgd)
def weights_that_are_assigned(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    model.load_state_dict(net().state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(job, model, optimizer, epochs=2)
