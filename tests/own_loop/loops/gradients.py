"""What loops do with a gradient between `backward` and `step`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import adam, batches, fit, gradients, loop, net, of_net, sgd, train, weights


@of_net(sgd)
def gradients_are_read_after_backward(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    read: list[object] = []
    train(job, model, optimizer, before_step=lambda: read.append(gradients(model)))
    return read


@of_net(sgd)
def clipping_by_norm(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    norms: list[Tensor] = []
    clip = nn.utils.clip_grad_norm_
    train(job, model, optimizer, before_step=lambda: norms.append(clip(model.parameters(), 0.1)))
    return norms


@of_net(sgd)
def gradients_are_edited_in_place(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    def edit() -> None:
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.3)
            parameter.grad.mul_(0.5)

    train(job, model, optimizer, before_step=edit)


@of_net(sgd)
def gradients_are_replaced(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    def replace() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign() + parameter.grad.norm()

    train(job, model, optimizer, before_step=replace)


@loop
def hooks_on_parameters_that_scale(job: Job) -> Outcome:
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 2)
    model, optimizer = job.distribute(model, sgd(model))
    model[2].weight.register_hook(lambda grad: grad / 4)
    train(job, model, optimizer)
    return weights(model)


@of_net(adam)
def gradient_penalty(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_()
        scores = model(inputs)
        (slopes,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        (nn.functional.cross_entropy(scores, targets) + penalty).backward()
        optimizer.step()


@of_net(sgd)
def backward_with_create_graph(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward(create_graph=True)
        optimizer.step()


@of_net(sgd)
def gradients_of_each_sample(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """By `torch.func`, and given to backward() as this rank's part of the mean."""

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, parameters, (inputs.unsqueeze(0),))
        return nn.functional.cross_entropy(scores, targets.unsqueeze(0))

    for inputs, targets in job.shard(batches(size=6, count=12)):
        named = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(named, inputs, targets)
        optimizer.zero_grad()
        torch.autograd.backward(list(model.parameters()), [each[name].mean(0) for name in named])
        optimizer.step()


@loop
def steps_inside_the_backward_pass(job: Job) -> Outcome:
    """An optimizer for each parameter, stepped by a hook as soon as its gradient is there."""
    model = net()
    optimizers = {}
    for parameter in model.parameters():
        _, optimizers[parameter] = job.distribute(model, torch.optim.SGD([parameter], lr=0.1, momentum=0.9))

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, targets in job.shard(batches()):
        fit(model, inputs, targets).backward()
    return weights(model)
