"""The ways in which the ranks of a team hold one model together. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from tutti.errors import BadOption, UnknownName
from tutti.records.pipeline import SCHEDULES

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.layout import Layout
    from tutti.model_parallel.memory import MemoryNeed


@dataclass(frozen=True)
class Way(ABC):
    """A way to hold one model on several ranks. The fields of a subclass are the options of `--parallel`."""

    @abstractmethod
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        """Make this rank's portion of a model (collective): see `portion_of`."""

    @abstractmethod
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        """The need of the rank that needs the most.

        `state` is the bytes of state that the optimizer keeps for each byte of parameters.
        """


@dataclass(frozen=True)
class Pipeline(Way):
    """Every rank has some of the layers, and batches pass through in small parts.

    Attributes:
        schedule: one of `SCHEDULES`.
        microbatches: into how many parts each team cuts its batch; by default twice the number of stages.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UnknownName("value", str(self.schedule), SCHEDULES, of="--parallel.schedule")
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise BadOption(f"--parallel.microbatches is {count!r}; give a whole number from 1")

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.pipeline import PipelinePortion, divide

        division = divide(module, self.schedule, self.microbatches, layout, workload)
        return PipelinePortion(module, division, layout, comm, workload)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.pipeline import divide, need_of_rank

        division = divide(module, self.schedule, self.microbatches, layout, workload)
        needs = [need_of_rank(rank, division, layout, workload, state) for rank in range(layout.team)]
        return max(needs, key=lambda need: need.total)


@dataclass(frozen=True)
class Sharded(Way):
    """The ranks hold slices of every parameter, and gather it for use."""

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.base import LayoutRanks
        from tutti.model_parallel.fsdp import ShardedPortion
        from tutti.model_parallel.group import TeamMesh

        ranks = LayoutRanks.of(comm, layout.team)
        return ShardedPortion(module, ranks, TeamMesh(comm, layout.team), workload)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.fsdp import need

        return need(layout, module, workload, state)


@dataclass(frozen=True)
class Tensor(Way):
    """Every layer's weights are cut over the ranks.

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
        from tutti.model_parallel.tensor import need

        if self.plan is not None:
            raise BadOption("what a plan does to the memory is not known before it is carried out")
        return need(layout, module, workload, state)


WAYS: Final[dict[str, type[Way]]] = {"pipeline": Pipeline, "sharded": Sharded, "tensor": Tensor}
"""The ways by name."""
