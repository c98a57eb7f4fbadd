"""What loops do with a gradient between `backward` and `step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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
    sgd,
    train,
    weights,
)


@loop
def gradients_are_read_after_backward(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    read = []
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        read.append(gradients(model))
        optimizer.step()
    return weights(model), read


@loop
def gradients_are_read_after_the_step(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    read = []
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        read.append(gradients(model))
        fit(model, inputs, targets).backward()
        optimizer.step()
        read.append(gradients(model))
    return weights(model), read


@loop
def clipping_by_norm(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    norms = []
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return weights(model), norms


@loop
def clipping_by_value(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return weights(model)


@loop
def clipping_of_accumulated_gradients(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    optimizer.zero_grad()
    for inputs, targets in job.shard(batches()):
        fit(model, inputs, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    return weights(model)


@loop
def gradients_are_edited_in_place(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.3)
            parameter.grad.mul_(0.5)
        optimizer.step()
    return weights(model)


@loop
def gradients_are_replaced(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign() + parameter.grad.norm()
        optimizer.step()
    return weights(model)


@loop
def gradients_by_autograd_grad(job: Job) -> Outcome:
    """`autograd.grad` runs no accumulation: what the loop assigns is this rank's part of the mean."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        parts = torch.autograd.grad(fit(model, inputs, targets), list(model.parameters()))
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part
        optimizer.step()
    return weights(model)


@loop
def gradient_of_one_parameter_is_dropped(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    for number, (inputs, targets) in enumerate(job.shard(batches())):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        if number == 1:
            model[0].bias.grad = None
        optimizer.step()
    return weights(model)


@loop
def hooks_on_parameters_that_scale(job: Job) -> Outcome:
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 2)
    model, optimizer = job.distribute(model, sgd(model))
    model[2].weight.register_hook(lambda grad: grad / 4)
    train(job, model, optimizer, epochs=1)
    return weights(model)


@loop
def hooks_after_accumulation(job: Job) -> Outcome:
    """Such a hook sees `parameter.grad`: elementwise edits of it are heeded."""
    model = net()
    seen = []
    model, optimizer = job.distribute(model, sgd(model))
    model[2].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(len(parameter.grad)))
    train(job, model, optimizer, epochs=1)
    return weights(model), seen


@loop
def hooks_on_modules(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    train(job, model, optimizer, epochs=1)
    return weights(model)


@loop
def gradient_penalty(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_()
        scores = model(inputs)
        (slopes,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        (nn.functional.cross_entropy(scores, targets) + penalty).backward()
        optimizer.step()
    return weights(model)


@loop
def backward_with_create_graph(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward(create_graph=True)
        optimizer.step()
    return weights(model)


@loop
def backward_into_named_inputs(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward(inputs=[model[2].weight, model[2].bias])
        optimizer.step()
    return weights(model), gradients(model)


@loop
def gradients_of_each_sample(job: Job) -> Outcome:
    """By `torch.func`: what the loop assigns is this rank's part of the mean."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, parameters, (inputs.unsqueeze(0),))
        return nn.functional.cross_entropy(scores, targets.unsqueeze(0))

    for inputs, targets in job.shard(batches(size=6, count=12)):
        named = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(named, inputs, targets)
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        optimizer.step()
    return weights(model)


@loop
def gradients_are_kept_from_step_to_step(job: Job) -> Outcome:
    """The mean of this gradient and the last one, by hand."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        for parameter, last in zip(model.parameters(), kept, strict=True):
            parameter.grad.add_(last).div_(2)
            last.copy_(parameter.grad)
        optimizer.step()
    return weights(model), kept


@loop
def gradients_of_two_losses_are_projected(job: Job) -> Outcome:
    """Where two gradients conflict, one is projected (Yu et al. 2020): not linear in them."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        held = []
        for loss in (fit(model, inputs, targets), model(inputs).square().mean()):
            optimizer.zero_grad()
            loss.backward()
            held.append([p.grad.clone() for p in model.parameters()])
        for parameter, one, two in zip(model.parameters(), *held, strict=True):
            along = (one * two).sum()
            parameter.grad = one + two - along.clamp(max=0) / two.square().sum() * two
        optimizer.step()
    return weights(model)


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


@loop
def clipping_through_the_optimizer(job: Job) -> Outcome:
    """Between steps the optimizer's groups list the model's own parameters."""
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(one is two for one, two in zip(listed, model.parameters(), strict=True))
        nn.utils.clip_grad_norm_(listed, 0.1)
        optimizer.step()
    return weights(model), [list(optimizer.state[p]) for p in model.parameters()]


@loop
def hooks_on_one_rank_that_only_look(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    norms = []
    if job.rank == 0:
        model[0].weight.register_hook(lambda grad: norms.append(grad.norm()))
    for inputs, targets in job.shard(batches(size=3)):
        fit(model, inputs, targets).backward()
        optimizer.step()
    assert bool(norms) == (job.rank == 0)
    return weights(model)


@loop
def a_hook_and_gradients_that_are_asked_for(job: Job) -> Outcome:
    """`torch.autograd.grad` calls hooks too, with what it is to return."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    model[0].weight.register_hook(lambda grad: grad * 2)
    for inputs, targets in job.shard(batches(size=6, count=12)):
        optimizer.zero_grad()
        asked = torch.autograd.grad(fit(model, inputs, targets), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), asked, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def hooks_on_a_sparse_embedding(job: Job) -> Outcome:
    model = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3))
    model, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.register_hook(lambda grad: grad * 3)
    rows = TensorDataset(torch.tensor([0, 3, 3, 5, 6, 0, 1]))
    for (numbers,) in job.shard(DataLoader(rows, 3)):
        model(numbers).square().sum(1).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return weights(model)


@loop
def the_gradient_of_a_gradient(job: Job) -> Outcome:
    """A penalty on the norm of the parameters' gradient: not a mean over the samples."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward(create_graph=True)
        slopes = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        (0.1 * sum(slope.square().sum() for slope in slopes)).backward()
        optimizer.step()
    return weights(model)


@loop
def gradients_are_held_beyond_zero_grad(job: Job) -> Outcome:
    """`zero_grad` lets go of the tensors, so that who holds one keeps its values."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    held = []
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        held.append([p.grad for p in model.parameters()])
        optimizer.step()
    return weights(model), held


@loop
def gradients_are_moved_to_another_model(job: Job) -> Outcome:
    """A copy is trained by the very gradient tensors of the model."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    other = net()
    own = torch.optim.SGD(other.parameters(), lr=0.05)
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()
        own.step()
    return weights(model, other)


@loop
def gradients_are_swapped_between_losses(job: Job) -> Outcome:
    """Gradients of one loss are put aside while those of another come, and then added."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        aside = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs).square().mean().backward()
        norms = [p.grad.norm() for p in model.parameters()]
        for parameter, first, norm in zip(model.parameters(), aside, norms, strict=True):
            parameter.grad.div_(norm).add_(first)
        optimizer.step()
    return weights(model)


def _read_after_the_step(job: Job, scaled: bool, **options: Any) -> Outcome:
    """Torch's optimizers may leave other gradients than they found."""
    model = net()
    model, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, **options))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    read = []
    for inputs, targets in job.shard(batches()):
        scaler.scale(fit(model, inputs, targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        read.append(gradients(model))
    return weights(model), read


@loop
def gradients_that_nesterov_changes(job: Job) -> Outcome:
    return _read_after_the_step(job, scaled=False, foreach=True, nesterov=True, momentum=0.9)


@loop
def gradients_that_a_fused_step_unscales(job: Job) -> Outcome:
    return _read_after_the_step(job, scaled=True, fused=True, momentum=0.9)


def _square(job: Job) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model with two weights of one square shape."""
    torch.manual_seed(3)
    sizes = (FEATURES, FEATURES), (FEATURES, FEATURES), (FEATURES, CLASSES)
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes)).double()
    return job.distribute(model, sgd(model))


@loop
def gradients_are_transposed(job: Job) -> Outcome:
    model, optimizer = _square(job)
    weight = model[0].weight
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        weight.grad = weight.grad.T
        (2 * fit(model, inputs, targets)).backward()
        optimizer.step()
        weight.grad = weight.grad.T
        optimizer.step()
    return weights(model)


@loop
def gradients_of_two_parameters_are_exchanged(job: Job) -> Outcome:
    model, optimizer = _square(job)
    one, other = model[0].weight, model[1].weight
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        one.grad, other.grad = other.grad, one.grad
        optimizer.step()
        fit(model, inputs, targets).backward()
        one.grad, other.grad = other.grad.T, one.grad.T
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


@loop
def weights_of_two_parameters_are_exchanged(job: Job) -> Outcome:
    model, optimizer = _square(job)
    one, other = model[0].weight, model[1].weight
    for turned in (False, True):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
        one.data, other.data = (other.data.T, one.data.T) if turned else (other.data, one.data)
    return weights(model)


@loop
def weights_are_transposed(job: Job) -> Outcome:
    model, optimizer = _square(job)
    for _ in range(2):
        train(job, model, optimizer, epochs=1)
        model[0].weight.data = model[0].weight.data.T
    return weights(model)
