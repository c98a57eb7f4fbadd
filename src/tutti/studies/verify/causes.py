"""Causes for which training on parts of a batch differs from training on the whole, found by trials."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tutti.data import Batch
from tutti.run.task import Task
from tutti.studies.verify.tolerance import AMPLE, MOST, TOLERANCES
from tutti.training.evaluation import evaluating


def by_design(task: Task, module: nn.Module, batch: Batch, parts: int, part: str) -> Iterator[str]:
    """Name the modules of the model that make parts of a batch differ from the whole by design.

    Args:
        task: what is learned.
        module: the model as training begins; it is not changed.
        batch: the first one.
        parts: how many parts are tried.
        part: what a part is, in words.
    """
    # A model may keep some of its layers in evaluation mode.
    layers = dict(copy.deepcopy(module).train().named_modules())
    norms = [
        name
        for name, one in layers.items()
        if isinstance(one, nn.modules.batchnorm._BatchNorm) and (one.training or one.running_mean is None)
    ]
    dropouts = [
        name
        for name, one in layers.items()
        if isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 and one.training
    ]
    if norms:
        yield (
            f"BatchNorm ('{norms[0]}') normalises with the statistics of each {part}; GroupNorm or "
            f"LayerNorm would not"
        )
    if dropouts:
        yield (
            f"Dropout ('{dropouts[0]}') draws other random numbers for each {part}; switch it off to compare"
        )
    if norms or dropouts:
        return
    inputs = task.arithmetic.inputs(batch.inputs)
    whole = _outputs(task, module, inputs, seed=0)
    if is_random(task, module, batch):
        yield f"the model draws random numbers, others for each {part}; switch that off to compare"
    elif _differ(task, whole, torch.cat([_outputs(task, module, x, 0) for x in inputs.chunk(parts)])):
        yield f"the model computes the outputs of a sample from all samples of its {part}"


def is_random(task: Task, module: nn.Module, batch: Batch) -> bool:
    """Tell whether the outputs of a model depend on random numbers, as with dropout."""
    inputs = task.arithmetic.inputs(batch.inputs)
    return _differ(task, *(_outputs(task, module, inputs, seed) for seed in (0, 1)))


def of_the_loss(task: Task, module: nn.Module, batch: Batch, parts: int) -> str | None:
    """Why the loss of a batch cannot be put together from its parts; None if it can."""
    inputs, targets = task.arithmetic.inputs(batch.inputs), task.arithmetic.targets(batch.targets)
    with evaluating(module), torch.no_grad():
        outputs = task.arithmetic.forward(module, inputs)
    whole = _mean(task, [outputs], [targets])
    together = _mean(task, outputs.chunk(parts), targets.chunk(parts))
    # The same numbers in another order: nothing amplifies the rounding of their sums.
    if abs(together - whole) <= AMPLE * TOLERANCES[_dtype(task)]["loss"] * abs(whole):
        return None
    return (
        f"loss '{task.loss.name}' of a whole batch is {whole:.6g}, put together from {parts} parts "
        f"{together:.6g}: it is no mean over the samples; if it divides by something else (class weights, "
        "labels that count), let it return (the sum of the losses, what to divide it by)"
    )


def _outputs(task: Task, module: nn.Module, inputs: Tensor, seed: int) -> Tensor:
    """Return the outputs in training, from a given state of the random generators."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        return task.arithmetic.forward(copy.deepcopy(module).train(), inputs)


def _mean(task: Task, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """The loss of some samples that come in parts."""
    total = whole = 0.0
    with torch.no_grad():
        for one, its in zip(outputs, targets, strict=True):
            loss, weight = task.loss.measure(one, its)
            total, whole = total + loss.item() * len(its), whole + weight
    return total / whole if whole else 0.0


def _differ(task: Task, one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > MOST[_dtype(task)] * one.norm())


def _dtype(task: Task) -> str:
    return "float64" if task.arithmetic.precision == "fp64" else "float32"
