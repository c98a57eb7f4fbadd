"""The choice of a rank's portion of the model by the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from tutti.comm.base import Communicator
from tutti.model_parallel.base import LayoutRanks, Portion, Whole, Workload
from tutti.model_parallel.layout import Layout, Options, Pipeline, Sharded, Tensor
from tutti.model_parallel.tensor import TensorPortion


def portion_of(layout: Layout | None, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
    """Make this rank's portion of a model (collective).

    Args:
        layout: who holds what; None: each rank the whole.
        comm: all ranks that train.
        module: the model, alike on all ranks. It becomes the portion.
        workload: the samples and the loss.

    Raises:
        BadModel: the model cannot be divided like that; the message names the layer.
        BadOption: an option does not fit the model.
    """
    if layout is None:
        return Whole(module, comm)
    return _MAKERS[type(layout.options)](layout, comm, module, workload)


Maker = Callable[[Layout, Communicator, nn.Module, Workload], Portion]


def _tensor(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
    assert isinstance(layout.options, Tensor)
    if layout.options.plan is None:
        return TensorPortion(module, LayoutRanks.of(layout, comm))
    from tutti.model_parallel.dtensor import PlannedPortion
    from tutti.model_parallel.group import TeamMesh

    return PlannedPortion(module, LayoutRanks.of(layout, comm), TeamMesh(layout, comm), layout.options.plan)


def _sharded(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
    from tutti.model_parallel.fsdp import ShardedPortion
    from tutti.model_parallel.group import TeamMesh

    ranks, group = LayoutRanks.of(layout, comm), TeamMesh(layout, comm)
    return ShardedPortion(module, ranks, group, workload.loss, workload.arithmetic)


def _pipeline(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
    from tutti.model_parallel.pipeline import PipelinePortion

    return PipelinePortion(module, layout, comm, workload)


# torch.distributed's parts are imported where they are used: some take a second.
_MAKERS: Final[dict[type[Options], Maker]] = {Tensor: _tensor, Pipeline: _pipeline, Sharded: _sharded}
