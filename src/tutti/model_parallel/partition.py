"""The partition of a model's blocks into the stages of a pipeline, even in time and in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from tutti.errors import BadModel
from tutti.model_parallel.fx_blocks import Block
from tutti.training.evaluation import undone
from tutti.training.precision import Arithmetic

REPEATS: Final = 3
"""The number of times that each block is timed; the fastest counts."""

COPIES: Final = 4
"""Of a weight a rank holds itself, its gradient, and with Adam two averages of that."""


ROOM: Final = 1.25
"""Factor by which the largest stage may exceed what is necessary for the sake of time."""


@dataclass(frozen=True)
class Cost:
    """The cost of a block.

    Attributes:
        seconds: of forward and backward of a microbatch.
        nbytes: of weights, gradients and optimizer state, and of what forward keeps for backward.
    """

    seconds: float
    nbytes: int


def boundaries(blocks: Sequence[Block], inputs: Tensor, arithmetic: Arithmetic) -> list[Tensor]:
    """The inputs of each block, and the outputs of the last, for some inputs: shapes on the meta device.

    Random numbers and buffers are as before afterwards.

    Raises:
        BadModel: a block does not keep samples apart.
    """
    values, found = inputs, [inputs.to("meta")]
    with undone(block.module for block in blocks), torch.no_grad():
        for block in blocks:
            outputs = arithmetic.forward(block, values)
            if outputs.dim() == 0 or len(outputs) != len(inputs):
                raise BadModel(
                    f"layer '{block.name}' of the model makes shape {tuple(outputs.shape)} of "
                    f"{tuple(values.shape)}; in a pipeline the first dimension must stay the samples"
                )
            values = outputs
            found.append(outputs.to("meta"))
    return found


def measure(blocks: Sequence[Block], inputs: Tensor, arithmetic: Arithmetic) -> list[Cost]:
    """Measure the cost of each block for a microbatch.

    Random numbers, buffers and gradients are as before afterwards.
    """
    costs, values = [], inputs
    with undone(block.module for block in blocks):
        for number, block in enumerate(blocks):
            seconds, kept, values = _measured(block, values.detach().requires_grad_(number > 0), arithmetic)
            weights = sum(p.nbytes for p in block.module.parameters())
            costs.append(Cost(seconds, COPIES * weights + kept))
    return costs


def _measured(block: Block, inputs: Tensor, arithmetic: Arithmetic) -> tuple[float, int, Tensor]:
    """The fastest forward and backward in seconds, the bytes kept between them, and the outputs."""
    fastest = float("inf")
    trained = [p for p in block.module.parameters() if p.requires_grad]
    wanted = [*trained, *([inputs] if inputs.requires_grad else [])]
    for _ in range(REPEATS):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        began = perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # What changes its inputs in place must not do so twice.
            outputs = arithmetic.forward(block, inputs.clone() if inputs.requires_grad else inputs)
        torch.autograd.grad(outputs, wanted, torch.ones_like(outputs), allow_unused=True)
        fastest = min(fastest, perf_counter() - began)
    own = {p.untyped_storage().data_ptr() for p in trained}
    return fastest, sum(size for place, size in kept.items() if place not in own), outputs.detach()


def balance(costs: Sequence[Cost], stages: int) -> list[slice]:
    """Cut blocks into consecutive stages that are even in time, as far as memory allows.

    The slowest stage is as fast as can be, among the cuts whose largest stage needs at most `ROOM` times the
    memory that it must.

    Args:
        costs: of each block.
        stages: how many there are to be, at most as many as blocks.

    Returns:
        The blocks of each stage, at least one.
    """

    def nbytes(first: int, last: int) -> float:
        return float(sum(cost.nbytes for cost in costs[first:last]))

    def seconds(first: int, last: int) -> float:
        fits = nbytes(first, last) <= ROOM * least
        return sum(cost.seconds for cost in costs[first:last]) if fits else math.inf

    least, _ = _evenly(nbytes, len(costs), stages)
    _, edges = _evenly(seconds, len(costs), stages)
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
