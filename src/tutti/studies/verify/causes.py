"""Experiments that show why training on parts of a batch differs from training on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Final

import torch
from torch import Tensor, nn

from tutti.data import Batch
from tutti.data.columns import mapped
from tutti.studies.verify.tolerance import AMPLE, DTYPES, MOST, TOLERANCES
from tutti.training.dropout import drawn_by_sample
from tutti.training.evaluation import Objective, evaluating

MICROBATCH: Final = "microbatch"
"""The part of a batch that goes through a pipeline at once."""


def by_design(
    objective: Objective, module: nn.Module, batch: Batch, parts: int, part: str, normalised: bool = False
) -> Iterator[str]:
    """Yield reasons why parts of a batch differ from the whole by design.

    The model and the batch are the first ones. `part` is a part of the batch in words; with `normalised`,
    BatchNorm has the statistics of the whole batch.
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
    if norms and not normalised:
        yield (
            f"BatchNorm ('{norms[0]}') normalises with the statistics of each {part}; GroupNorm and "
            "LayerNorm do not"
        )
    if dropouts and part == MICROBATCH:
        yield f"Dropout ('{dropouts[0]}') draws random numbers for each {part}; switch it off to compare"
    elif is_random(objective, module, batch):
        yield f"the model draws random numbers for each {part}; switch that off to compare"
    elif not norms and _mixes(objective, module, batch, parts):
        yield f"the model computes the outputs of a sample from all samples of its {part}"


def _mixes(objective: Objective, module: nn.Module, batch: Batch, parts: int) -> bool:
    """Return whether parts of a batch have other outputs than the whole."""
    whole, *cut = (_outputs(objective, module, one, 0) for one in (batch, *cut_batch(batch, parts)))
    return _differ(objective, whole, torch.cat(cut))


def is_random(objective: Objective, module: nn.Module, batch: Batch) -> bool:
    """Return whether the outputs depend on random numbers, other than those that are drawn by sample."""
    return _differ(objective, *(_outputs(objective, module, batch, seed) for seed in (0, 1)))


def cut_batch(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cut a batch into parts, each with its share of the update."""
    assert batch.samples is not None, "training batches have the numbers of their samples"
    for here in torch.arange(len(batch.targets)).chunk(parts):
        inputs = mapped(batch.inputs, methodcaller("__getitem__", here))
        share = batch.share * len(here) / len(batch.targets)
        weights = None if batch.weights is None else batch.weights[here]
        yield Batch(inputs, batch.targets[here], share, batch.samples[here], weights)


def of_the_loss(objective: Objective, module: nn.Module, batch: Batch, parts: int) -> str | None:
    """Return why the loss of a batch is not the mean of its parts; None: it is."""
    arithmetic = objective.arithmetic
    inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
    if objective.loss.whole or batch.weights is not None:
        # The loss may use the outputs in any way, so the model computes each part.
        whole = _mean_computed(objective, module, [batch])
        together = _mean_computed(objective, module, cut_batch(batch, parts))
    else:
        with evaluating(module), torch.no_grad():
            outputs = arithmetic.forward(module, inputs)
        whole = _mean(objective, [outputs], [targets])
        together = _mean(objective, outputs.chunk(parts), targets.chunk(parts))
    # Only the order of sums differs, and nothing amplifies its rounding.
    if abs(together - whole) <= AMPLE * TOLERANCES[_dtype(objective)]["loss"] * abs(whole):
        return None
    return (
        f"loss '{objective.loss.name}' of a whole batch is {whole:.6g}, but {together:.6g} as the mean over "
        f"{parts} parts: it is no mean over the samples; if it divides by something else (class weights, "
        "labels that count), return a pair: the sum of the losses, and what to divide it by"
    )


def _outputs(objective: Objective, module: nn.Module, batch: Batch, seed: int) -> Tensor:
    """Return the outputs in training mode, with random numbers from this seed."""
    module = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=()), torch.no_grad(), drawn_by_sample(module, seed=0) as masks:
        torch.manual_seed(seed)
        masks.begin(0, batch.samples)
        return objective.arithmetic.forward(module, objective.arithmetic.inputs(batch.inputs))


def _mean(objective: Objective, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Return the mean loss over parts, from their outputs."""
    total = whole = 0.0
    with torch.no_grad():
        for one, its in zip(outputs, targets, strict=True):
            loss, weight = objective.loss.measure(one, its)
            total, whole = total + loss.item() * len(its), whole + weight
    return total / whole if whole else 0.0


def _mean_computed(objective: Objective, module: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss over batches, each computed by the model."""
    arithmetic, total, whole = objective.arithmetic, 0.0, 0.0
    with evaluating(module), torch.no_grad():
        for batch in batches:
            inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
            computed = objective.compute(module, inputs, targets, batch.weights)
            total, whole = total + computed.loss.item() * len(targets), whole + computed.weight
    return total / whole if whole else 0.0


def _differ(objective: Objective, one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > MOST[_dtype(objective)] * one.norm())


def _dtype(objective: Objective) -> str:
    return next(name for name, precision in DTYPES.items() if precision == objective.arithmetic.precision)
