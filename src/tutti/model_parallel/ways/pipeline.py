"""`--parallel pipeline`: every rank has some of the layers, and batches pass through in small parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from tutti.errors import BadOption, UnknownName
from tutti.model_parallel.layout import Layout, Way
from tutti.records.pipeline import SCHEDULES
from tutti.registry import part

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed


@part("pipeline")
@dataclass(frozen=True)
class Pipeline(Way):
    """Pipeline parallelism.

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
