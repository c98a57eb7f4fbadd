"""Evaluation over all ranks: each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tutti.comm.base import Communicator, cut
from tutti.data.parts import Part
from tutti.replica import Replica
from tutti.strategies.placement import broadcast_all
from tutti.training.losses import Loss
from tutti.training.metrics import Metric
from tutti.training.precision import FP32, Arithmetic, is_of_keras
from tutti.training.sums import Tally


@dataclass(frozen=True)
class Objective:
    """The figures that are computed of a model's outputs, and the arithmetic of the model.

    Attributes:
        loss: of the run.
        metrics: computed besides.
        classes: the classes of the confusion matrix; None: no matrix.
        arithmetic: how the model computes; it was prepared by it.
    """

    loss: Loss
    metrics: Sequence[Metric] = ()
    classes: int | None = None
    arithmetic: Arithmetic = FP32


def evaluate(
    module: nn.Module, part: Part, comm: Communicator, objective: Objective, *, batch_size: int = 250
) -> Tally:
    """Sum loss and metrics of `module` over this rank's share of `part`; `total(comm)` adds up those of all.

    The samples are cut over the ranks, and sums, not means, are added up: every sample counts once, by its
    true weight, whatever the number of ranks. Every rank uses its own `module`; they should hold the same
    weights, and the same statistics of BatchNorm (`average_buffers`).

    All ranks make the same number of passes, the last of which may count nothing: where several ranks hold
    one model, each pass needs all of them.

    Args:
        module: the model. It is in evaluation mode meanwhile, and in its own modes again afterwards.
        part: the samples.
        comm: all ranks that take part; nothing is exchanged with them here.
        objective: what is computed.
        batch_size: samples of one forward pass of one rank.
    """
    loss, arithmetic = objective.loss, objective.arithmetic
    tally = Tally(objective.metrics, objective.classes, loss.ignored, loss.amounts)
    shares = cut(len(part), comm.size)
    mine, longest = shares[comm.rank], shares[0]
    # No collective inside: what the thread holds (gradient mode, autocast) may be shared by several ranks.
    with evaluating(module), torch.no_grad():
        for start in range(mine.start, mine.start + longest.stop, batch_size):
            stop = min(start + batch_size, mine.stop)
            counts = start < stop
            positions = (start, stop) if counts else (0, 1)
            inputs, targets = part.take(torch.arange(*positions, device=part.device))
            outputs, targets = (
                arithmetic.forward(module, arithmetic.inputs(inputs)),
                arithmetic.targets(targets),
            )
            if counts:
                value, weight = loss.measure(outputs, targets)
                tally.add(arithmetic.number(value), outputs, targets, weight)
    return tally


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode; afterwards each of its parts is in its mode of before."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def average_buffers(replica: Replica, comm: Communicator) -> None:
    """Set the floating-point buffers of all ranks to their mean, and all others to rank 0's (collective).

    Each rank's BatchNorm has seen other samples; evaluation needs one set of statistics. Counts of
    forward passes are rank 0's: the others may have had no sample of a short batch.
    """
    if comm.size == 1:
        return
    broadcast_all([buffer for buffer in replica.module.buffers() if not buffer.is_floating_point()], comm)
    for buffer in [*replica.buffers, *keras_statistics(replica.module)]:
        # In float64 the mean of equal float32 numbers is exactly that number: constants stay constant.
        mean = buffer.to(device="cpu", dtype=torch.float64).flatten()
        comm.all_reduce(mean)
        buffer.copy_(mean.div_(comm.size).view(buffer.shape))


def keras_statistics(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that Keras has for floating-point buffers, such as BatchNorm's statistics."""
    if not is_of_keras(module):
        return []
    fixed = (parameter.detach() for parameter in module.parameters() if not parameter.requires_grad)
    return [parameter for parameter in fixed if parameter.is_floating_point()]
