"""The partition of a model's blocks into the stages of a pipeline, even in work and in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tutti.model_parallel.fx_blocks import Block
from tutti.training.evaluation import undone
from tutti.training.precision import Arithmetic

COPIES: Final = 4
"""Of a weight a rank holds itself, its gradient, and with Adam two averages of that."""

OPERATIONS_PER_BYTE: Final = 4
"""Operations that a core does in the time in which it moves a byte to memory or from there."""

ROOM: Final = 1.25
"""Factor by which the largest stage may exceed what is necessary for the sake of time."""


@dataclass(frozen=True)
class Cost:
    """The cost of a block.

    Attributes:
        work: operations of forward and backward of a microbatch, with those that moving its bytes is worth.
        nbytes: of weights, gradients and optimizer state, and of what forward keeps for backward.
    """

    work: float
    nbytes: int


def costs_of(
    blocks: Sequence[Block], inputs: Tensor, arithmetic: Arithmetic
) -> tuple[list[Cost], list[Tensor]]:
    """Count the cost of each block for a microbatch: every rank finds the same, in every run.

    Random numbers, buffers and gradients are as before afterwards.

    Returns:
        The costs, and the inputs of each block and the outputs of the last: shapes on the meta device.
    """
    costs, values, edges = [], inputs, [inputs.to("meta")]
    with undone(block.module for block in blocks):
        for number, block in enumerate(blocks):
            cost, values = _cost_of(block, values.detach().requires_grad_(number > 0), arithmetic)
            costs.append(cost)
            edges.append(values.to("meta"))
    return costs, edges


def _cost_of(block: Block, inputs: Tensor, arithmetic: Arithmetic) -> tuple[Cost, Tensor]:
    """Run forward and backward; returns the cost and the outputs."""
    trained = [p for p in block.module.parameters() if p.requires_grad]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = arithmetic.forward(block.module, inputs.clone() if inputs.requires_grad else inputs)
        wanted = [*trained, *([inputs] if inputs.requires_grad else [])]
        torch.autograd.grad(outputs, wanted, torch.ones_like(outputs), allow_unused=True)
    own = {p.untyped_storage().data_ptr() for p in trained}
    nbytes = sum(size for place, size in kept.items() if place not in own)
    nbytes += COPIES * sum(p.nbytes for p in block.module.parameters())
    work = counter.get_total_flops() + OPERATIONS_PER_BYTE * nbytes
    return Cost(work, nbytes), outputs.detach()


def balance(costs: Sequence[Cost], stages: int) -> list[slice]:
    """Cut blocks into consecutive stages that are even in work, as far as memory allows.

    The largest work of a stage is as small as can be, among the cuts whose largest stage needs at most `ROOM`
    times the memory that it must.

    Args:
        costs: of each block.
        stages: how many there are to be, at most as many as blocks.

    Returns:
        The blocks of each stage, at least one.
    """

    def nbytes(first: int, last: int) -> float:
        return float(sum(cost.nbytes for cost in costs[first:last]))

    def work(first: int, last: int) -> float:
        fits = nbytes(first, last) <= ROOM * least
        return sum(cost.work for cost in costs[first:last]) if fits else math.inf

    least, _ = _evenly(nbytes, len(costs), stages)
    _, edges = _evenly(work, len(costs), stages)
    return [slice(first, last) for first, last in pairwise(edges)]


def _evenly(load: Callable[[int, int], float], count: int, parts: int) -> tuple[float, list[int]]:
    """Cut `range(count)` so that the largest load of a part, `load(first, last)`, is as small as can be."""
    # best[k][n]: the largest load of the first n in k + 1 parts, and where the last of these begins.
    best = [[(load(0, n), 0) for n in range(count + 1)]]
    for part in range(1, parts):
        row = [(math.inf, part)] * (count + 1)
        for n in range(part + 1, count + 1):
            row[n] = min((max(best[-1][at][0], load(at, n)), at) for at in range(part, n))
        best.append(row)
    edges = [count]
    for row in reversed(best):
        edges.append(row[edges[-1]][1])
    return best[-1][count][0], edges[::-1]
