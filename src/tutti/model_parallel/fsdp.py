"""Fully sharded data parallelism: the ranks of a team hold slices of every parameter, and gather it for use.

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

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tutti.data.batches import Batch
from tutti.errors import BadModel
from tutti.model_parallel.base import LayoutRanks, Workload
from tutti.model_parallel.dtensor import DTensorPortion
from tutti.model_parallel.group import TeamMesh
from tutti.torch_backend.errors import Mismatch
from tutti.training.evaluation import Objective
from tutti.training.run_parts import Computed


class ShardedPortion(DTensorPortion):
    """The slices that one rank has of a model's parameters."""

    def __init__(self, module: nn.Module, ranks: LayoutRanks, group: TeamMesh, workload: Workload) -> None:
        super().__init__(module, ranks, lambda _: True, group)
        self.peers, self._workload = ranks.every, workload
        self._objective = Objective(workload.loss, arithmetic=workload.arithmetic)
        *layers, whole = units(module)
        for unit in (*layers, whole):
            # Of the whole, too, what is gathered is dropped at once: states are made between two passes.
            fully_shard(unit, mesh=group.team, reshard_after_forward=True)
        self._check = LayerCheck(whole, layers, group)
        self.compute = self._compute

    def _compute(self, batch: Batch) -> Computed:
        """Forward and backward; a rank without samples computes one that counts for nothing, as all must."""
        arithmetic = self._objective.arithmetic
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        count = len(targets)
        if not count:
            inputs, targets = self._workload.batch(1)
        began = perf_counter()
        outputs, loss, weight = self._objective.compute(self.module, inputs, targets)
        seconds = {"forward": perf_counter() - began}
        with self._check.together("backward"):
            # FSDP makes the mean of a team's gradients; what is wanted is their sum.
            torch.autograd.backward(loss, loss.new_tensor(batch.share * self.ranks.team.size))
            self._check.compare([name for name, p in self.module.named_parameters() if p.grad is not None])
        outputs, targets = outputs.detach()[:count], targets[:count]
        if not count:
            return Computed(0.0, outputs, targets, 0.0, seconds)
        return Computed(loss.item(), outputs, targets, weight, seconds)


class LayerCheck:
    """The check that the passes of all ranks of a team go through the same layers.

    A layer's weights are gathered when the ranks come to it. Ranks that come to different layers would wait
    for ever, or gather what does not belong together.

    Args:
        module: the model, sharded. Its forward passes are watched from now on.
        layers: those of its layers that are gathered by themselves.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module], group: TeamMesh) -> None:
        self._team = group.team.get_group()
        self._came: list[str] = []
        names = {layer: name for name, layer in module.named_modules()}
        for layer in layers:
            # Before FSDP's own, which gathers.
            layer.register_forward_pre_hook(partial(self._come, names[layer]), prepend=True)
        forward = module.forward

        def watched(*arguments: object, **options: object) -> object:
            self._came.clear()
            with self.together("forward"):
                outputs: object = forward(*arguments, **options)
                self.compare(self._came)
            return outputs

        module.forward = watched

    def _come(self, name: str, *_: object) -> None:
        self._came.append(name)

    @contextmanager
    def together(self, way: str) -> Iterator[None]:
        """Translate the error if ranks call different collectives inside.

        Raises:
            BadModel: they do.
        """
        try:
            yield
        except Mismatch as error:
            last = f"; this rank's last layer was '{self._came[-1]}'" if self._came else ""
            raise _apart(f"in a {way} pass {error}{last}") from error

    def compare(self, names: list[str]) -> None:
        """Refuse that the ranks have come to different layers, or have gradients of different parameters.

        Raises:
            BadModel: they have.
        """
        own = torch.tensor([zlib.crc32("\n".join(names).encode())])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._team))]
        dist.all_gather(every, own, group=self._team)
        found = torch.cat(every)
        if bool((found == found[0]).all()):
            return
        lists: list[list[str] | None] = [None] * len(every)
        dist.all_gather_object(lists, names, group=self._team)
        ranks = dist.get_process_group_ranks(self._team)
        first, other = 0, int((found != found[0]).nonzero()[0])
        pairs = zip_longest(cast("list[str]", lists[first]), cast("list[str]", lists[other]))
        here, there = next((one, two) for one, two in pairs if one != two)
        raise _apart(
            f"rank {ranks[first]} came to {_named(here)} where rank {ranks[other]} came to {_named(there)}"
        )


def _named(name: str | None) -> str:
    return "the end" if name is None else f"'{name}'"


def _apart(what: str) -> BadModel:
    return BadModel(
        f"the ranks went through different layers of the model: {what}. With --parallel sharded all ranks "
        "must use the same layers, in the same order, in every pass, as they hold each of them together; "
        "use all layers on all ranks, times 0 where one is not to count, or leave --parallel out: with "
        "--strategy sync ranks may use different layers"
    )


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
