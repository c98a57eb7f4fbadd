"""Fully sharded data parallelism: every parameter lies in slices on the ranks of a team, whole for a moment.

    rank 0   gather 1, forward 1, drop 1 │ gather 2, forward 2, drop 2 │ ... │ gather 2, backward 2 │ ...
    rank 1   gather 1, forward 1, drop 1 │ gather 2, forward 2, drop 2 │ ... │ gather 2, backward 2 │ ...
                                                                         the sum of gradients, in slices

Every rank has samples of its own, as with `sync`. Of weights, gradients and optimizer state it holds its
slice alone; a layer's weights are gathered for its forward and its backward pass, and dropped again. That is
PyTorch's FSDP2.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.3;
Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tutti.data.batches import Batch
from tutti.parallel.base import Ranks
from tutti.parallel.group import Group
from tutti.parallel.moving import Gradients
from tutti.parallel.scattered import ScatteredPortion
from tutti.training.arithmetic import Arithmetic
from tutti.training.loop import Computed
from tutti.training.losses import Loss


class ShardedPortion(ScatteredPortion):
    """The slices that one rank has of a model's parameters.

    Args:
        module: the model, alike on all ranks. Its parameters are sharded in place.
        ranks: who holds what.
        group: torch.distributed among them.
        loss: of the run.
        arithmetic: how the model computes.
    """

    def __init__(
        self, module: nn.Module, ranks: Ranks, group: Group, loss: Loss, arithmetic: Arithmetic
    ) -> None:
        super().__init__(module, ranks.every, ranks, group)
        self._loss, self._arithmetic = loss, arithmetic
        for unit in units(module):
            fully_shard(unit, mesh=group.team)
        self.gradients = Gradients(module, lambda _: True)
        self.compute = self._compute

    def _compute(self, batch: Batch) -> Computed:
        """Forward and backward; a rank without samples computes one that counts for nothing, as all must."""
        inputs, targets = self._arithmetic.inputs(batch.inputs), self._arithmetic.targets(batch.targets)
        count = len(targets)
        if not count:
            inputs, targets = (x.new_zeros(1, *x.shape[1:]) for x in (inputs, targets))
        began = perf_counter()
        outputs = self._arithmetic.forward(self.module, inputs)
        loss, weight = self._loss.measure(outputs, targets)
        seconds = {"forward": perf_counter() - began}
        # FSDP makes the mean of a team's gradients; what is wanted is their sum.
        torch.autograd.backward(loss, loss.new_tensor(batch.share * self.ranks.team.size))
        outputs, targets = outputs.detach()[:count], targets[:count]
        if not count:
            return Computed(0.0, outputs, targets, 0.0, seconds)
        return Computed(loss.item(), outputs, targets, weight, seconds)


def units(module: nn.Module) -> list[nn.Module]:
    """The parts of a module whose parameters are gathered together: each layer by itself, the module last.

    Layers that share a parameter are left to the module.
    """
    owners = Counter(p for layer in module.modules() for p in layer.parameters(recurse=False))
    layers = [layer for layer in module.modules() if layer is not module]
    alone = [
        layer
        for layer in layers
        if (own := list(layer.parameters(recurse=False))) and all(owners[p] == 1 for p in own)
    ]
    # A layer inside of another goes first: what is taken is not taken again.
    return [*reversed(alone), module]
