"""What optimizers keep, and what goes with them: schedules, checkpoints, scalers."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.own_loop.custom import Counting
from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import adam, batches, fit, loop, net, of_net, samples, sgd, train, weights


@of_net(adam)
def state_of_the_optimizer_is_read(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    read = [dict(optimizer.state_dict())]
    train(job, model, optimizer)
    read.append(dict(copy.deepcopy(optimizer.state_dict())))
    train(job, model, optimizer)
    read.append(dict(optimizer.state_dict()))
    states = [dict(optimizer.state[p].items()) for p in model.parameters()]
    return read, states


def _through_a_file(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@of_net(adam)
def going_back_to_a_checkpoint(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    train(job, model, optimizer)
    saved = _through_a_file([model.state_dict(), optimizer.state_dict()])
    train(job, model, optimizer)
    after = weights(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    back = weights(model), dict(copy.deepcopy(optimizer.state_dict()))
    train(job, model, optimizer)
    return after, back, dict(optimizer.state_dict())


@loop
def warm_restarts_made_before(job: Job) -> Outcome:
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    rates: list[object] = []

    def after_step() -> None:
        schedule.step()
        rates.append(schedule.get_last_lr())

    train(job, *job.distribute(model, optimizer), epochs=2, after_step=after_step)
    return weights(model), rates


def _by_closures(job: Job, model: nn.Module, optimizer: Optimizer) -> None:
    for inputs, targets in job.shard(batches()):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = fit(model, inputs, targets)
            loss.backward()
            return loss

        optimizer.step(closure)


@of_net(adam)
def a_closure(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    _by_closures(job, model, optimizer)


@of_net(lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"))
def lbfgs_with_a_line_search(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """The search goes by the loss, which is a rank's own."""
    _by_closures(job, model, optimizer)


@loop
def step_hooks(job: Job) -> Outcome:
    model = net()
    optimizer = sgd(model)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    model, optimizer = job.distribute(model, optimizer)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    train(job, model, optimizer)
    return weights(model), seen


@of_net(lambda model: Counting(model.parameters(), lr=0.1))
def a_group_that_counts(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    train(job, model, optimizer, epochs=2)
    optimizer.eval()
    evaluated = weights(model)
    optimizer.train()
    train(job, model, optimizer)
    return evaluated, [group["k"] for group in optimizer.param_groups]


def _scaled(job: Job, overflow: bool, clip: bool = False, **options: Any) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, torch.optim.Adam(model.parameters(), 0.01, **options))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for number, (inputs, targets) in enumerate(job.shard(batches())):
        optimizer.zero_grad()
        if overflow and number == 1:
            # The first sample of the batch, so that one rank has it.
            inputs = torch.where(samples().tensors[0][4] == inputs, torch.inf, inputs)
        scaler.scale(fit(model, inputs, targets)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(model), scales


@loop
def a_gradient_scaler_and_clipping(job: Job) -> Outcome:
    return _scaled(job, overflow=False, clip=True)


@loop
def a_gradient_scaler_and_one_overflow_of_a_fused_optimizer(job: Job) -> Outcome:
    return _scaled(job, overflow=True, fused=True)
