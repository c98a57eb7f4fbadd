"""`--parallel tensor`: every layer's weights are cut over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from tutti.errors import BadOption
from tutti.model_parallel.layout import Layout, Way
from tutti.registry import part

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed


@part("tensor")
@dataclass(frozen=True)
class Tensor(Way):
    """Tensor parallelism.

    Attributes:
        plan: file.py:function or package.module:function, called with the model; returns a plan of
            `torch.distributed.tensor.parallel`, {name of a module: style}. None: every Linear and Conv2d
            layer is split by its outputs.
    """

    plan: str | None = None

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.base import LayoutRanks

        ranks = LayoutRanks.of(comm, layout.team)
        if self.plan is None:
            from tutti.model_parallel.tensor import TensorPortion

            return TensorPortion(module, ranks)
        from tutti.model_parallel.dtensor import PlannedPortion
        from tutti.model_parallel.group import TeamMesh

        return PlannedPortion(module, ranks, TeamMesh(comm, layout.team), self.plan)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.memory import held, of_teams, on_meta, peak_of_step
        from tutti.model_parallel.tensor import split

        if self.plan is not None:
            raise BadOption("what a plan does to the memory is not known before it is carried out")
        model = on_meta(module)
        # Rank 0 of a team that does not exist: on the meta device nothing is exchanged.
        split(model, cast("Communicator", SimpleNamespace(rank=0, size=layout.team)))
        peak = peak_of_step(model, workload, -(-workload.batch_size // layout.data))
        return of_teams(layout.data, *held(model), state, peak)
