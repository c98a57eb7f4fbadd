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
from itertools import pairwise, zip_longest
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tutti.data.batches import Batch
from tutti.errors import BadModel, CallsDiffer
from tutti.model_parallel.base import LayoutRanks, Workload
from tutti.model_parallel.dtensor import DTensorPortion
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, held, on_meta, peak_of_step
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
        with self._check.step():
            began = perf_counter()
            outputs, loss, weight = self._objective.compute(self.module, inputs, targets)
            seconds = {"forward": perf_counter() - began}
            # FSDP makes the mean of a team's gradients; what is wanted is their sum.
            torch.autograd.backward(loss, loss.new_tensor(batch.share * self.ranks.team.size))
        outputs, targets = outputs.detach()[:count], targets[:count]
        if not count:
            return Computed(0.0, outputs, targets, 0.0, seconds)
        return Computed(loss.item(), outputs, targets, weight, seconds)


class LayerCheck:
    """The check that all ranks of a team use the same layers in every step.

    A layer's weights are gathered when the ranks come to it. Ranks that come to different layers would wait
    for ever, or gather what does not belong together.

    Args:
        module: the model, sharded.
        layers: those of its layers that are gathered by themselves; their forward passes are watched.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module], group: TeamMesh) -> None:
        self._module, self._team = module, group.team.get_group()
        self._used: list[str] = []
        names = {layer: name for name, layer in module.named_modules()}
        for layer in layers:
            # Before FSDP's own, which gathers.
            layer.register_forward_pre_hook(partial(self._note, names[layer]), prepend=True)
        forward = module.forward

        def translated(*arguments: object, **options: object) -> object:
            self._used.clear()
            with self._translated():
                return forward(*arguments, **options)

        module.forward = translated

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CallsDiffer as error:
            last = f"; this rank's last layer was '{self._used[-1]}'" if self._used else ""
            raise _apart(f"{error}{last}") from error

    def _note(self, name: str, *_: object) -> None:
        self._used.append(name)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Refuse that ranks use different layers in the forward and backward pass inside (collective).

        Raises:
            BadModel: they do.
        """
        with self._translated():
            yield
        self._used += [name for name, p in self._module.named_parameters() if p.grad is not None]
        own = torch.tensor([zlib.crc32("\n".join(self._used).encode())])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._team))]
        dist.all_gather(every, own, group=self._team)
        other = next((rank for rank, one in enumerate(every) if one != every[0]), None)
        if other is None:
            return
        lists: list[list[str]] = [[] for _ in every]
        dist.all_gather_object(lists, self._used, group=self._team)
        pairs = zip_longest(lists[0], lists[other], fillvalue="the end")
        here, there = next((one, two) for one, two in pairs if one != two)
        ranks = dist.get_process_group_ranks(self._team)
        raise _apart(f"rank {ranks[0]} came to '{here}' where rank {ranks[other]} came to '{there}'")


def _apart(what: str) -> BadModel:
    return BadModel(
        f"the ranks went through different layers of the model: {what}. With --parallel sharded all ranks "
        "must use the same layers, in the same order, in every step, as they hold each of them together; "
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


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """The need of a rank: see `Way.need`."""
    model = on_meta(module)
    weights, gradients = (nbytes // layout.team for nbytes in held(model))
    whole = [sum(p.nbytes for p in unit.parameters(recurse=False)) for unit in units(model)]
    # In the backward pass a layer's gradients are there as a whole, its weights, and those of the next one.
    # The step below, of a model that has all weights, has only the gradients.
    most = max(2 * own + following for own, following in pairwise([*whole, 0]))
    peak = peak_of_step(model, workload, -(-workload.batch_size // layout.ranks)) + most - max(whole)
    return MemoryNeed(weights, gradients, int(state * gradients), peak)
