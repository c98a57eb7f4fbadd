"""`--parallel sharded`: the ranks hold slices of every parameter, and gather it for use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from typing_extensions import override

from tutti.model_parallel.layout import Layout, Way
from tutti.registry import part

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed


@part("sharded")
@dataclass(frozen=True)
class Sharded(Way):
    """Fully sharded data parallelism, which has no options."""

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.base import LayoutRanks
        from tutti.model_parallel.fsdp import ShardedPortion
        from tutti.model_parallel.group import TeamMesh

        return ShardedPortion(
            module, LayoutRanks.of(comm, layout.team), TeamMesh(comm, layout.team), workload
        )

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.fsdp import units
        from tutti.model_parallel.memory import MemoryNeed, held, on_meta, peak_of_step

        model = on_meta(module)
        weights, gradients = (nbytes // layout.team for nbytes in held(model))
        whole = [sum(p.nbytes for p in unit.parameters(recurse=False)) for unit in units(model)]
        # In the backward pass a layer's gradients are there as a whole, its weights, and those of the next
        # one. The step below, of a model that has all weights, has only the gradients.
        most = max(2 * own + following for own, following in pairwise([*whole, 0]))
        peak = peak_of_step(model, workload, -(-workload.batch_size // layout.ranks)) + most - max(whole)
        return MemoryNeed(weights, gradients, int(state * gradients), peak)
