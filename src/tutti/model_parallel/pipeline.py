"""Pipeline parallelism: every rank has some of the layers, and batches pass through in small parts.

    rank 0   F0 F1    B0 F2 B1 F3 B2    B3          forward and backward of microbatches 0 to 3
    rank 1      F0 B0 F1 B1 F2 B2 F3 B3             (1f1b: backward as early as possible)

A rank's wait at the beginning and at the end of a batch is the bubble. The more microbatches, the smaller it
is. PyTorch's `pipelining` has the schedules:

    gpipe   all forward passes, then all backward passes: the most memory
    1f1b    one forward, one backward in turn

Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.graph_module import _assign_attr
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.batches import Batch
from tutti.data.columns import Columns
from tutti.errors import BadOption
from tutti.model_parallel.base import LayoutRanks, Of, TeamPortion, Workload, count_of, taken, values_of
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, PeakMemory, held, of_teams, on_meta
from tutti.model_parallel.schedules import MicrobatchPasses, check_microbatches, in_flight
from tutti.model_parallel.stages import GraphBlock, stages_of
from tutti.records.pipeline import PipelineRecord, PipelineSpan, since_the_first
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Computed


@dataclass(frozen=True)
class StageDivision:
    """The division of a model into the stages of a pipeline."""

    schedule: str
    microbatches: int
    stages: list[Stage]  # one for each rank
    # of the input of each stage, and the output of the last, for a microbatch: on the meta device
    shapes: list[Tensor]


def divide(layout: Layout, module: nn.Module, workload: Workload) -> StageDivision:
    """Divide a model, which is unchanged, into stages; every rank finds the same."""
    arithmetic, schedule = workload.arithmetic, layout.schedule
    if arithmetic.layout != "contiguous":
        raise BadOption(
            f"--layout {arithmetic.layout} does not go through a pipeline, whose stages send "
            "contiguous tensors; leave it out, or use another --parallel"
        )
    weighted = workload.samples.stored_weights is not None
    if isinstance(workload.samples.stored_inputs, Columns) or workload.loss.whole or weighted:
        what = "a loss that gets all outputs" if workload.loss.whole else "several inputs, or sequences,"
        what = "weights of samples" if weighted else what
        raise BadOption(
            f"{what} cannot go through a pipeline, in which one tensor passes from stage to stage; use "
            "--parallel sharded or tensor"
        )
    batch = workload.batch_size // layout.data
    microbatches = check_microbatches(schedule, layout.microbatches, layout.team, batch)
    inputs = cast("Tensor", workload.batch(-(-batch // microbatches))[0])
    blocks, shapes = stages_of(module, inputs, arithmetic, layout.team)
    return StageDivision(schedule, microbatches, [Stage(one, arithmetic) for one in blocks], shapes)


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the need of the rank that needs the most."""
    division = divide(layout, module, workload)
    needs = [_need_of_rank(rank, division, layout, workload, state) for rank in range(layout.team)]
    return max(needs, key=lambda need: need.total)


def _need_of_rank(
    rank: int, division: StageDivision, layout: Layout, workload: Workload, state: float
) -> MemoryNeed:
    """Return the need of one backward pass, with all other microbatches in flight."""
    stage, shapes, microbatches = on_meta(division.stages[rank]), division.shapes, division.microbatches
    last = rank == layout.team - 1
    targets = workload.batch(len(shapes[0]))[1].to("meta")
    flying = in_flight(division.schedule, microbatches, rank, layout.team)
    kept: list[Tensor] = []
    with PeakMemory() as ledger:
        for _ in range(flying):
            inputs = torch.empty_like(shapes[rank], requires_grad=True) if rank else shapes[0]
            outputs = stage(inputs)
            kept.append(workload.loss(outputs, targets) if last else outputs)
        made = kept.pop()
        torch.autograd.backward(made, None if last else torch.empty_like(made))
    # Places for what is received: for all microbatches, those of inputs in flight counted above.
    places = (microbatches - (flying if rank else 0)) * shapes[rank].nbytes
    places += 0 if last else microbatches * shapes[rank + 1].nbytes
    return of_teams(layout.data, *held(stage), state, ledger.peak + places)


def portion(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> PipelinePortion:
    """Make this rank's stages of a model (collective)."""
    return PipelinePortion(module, divide(layout, module, workload), layout, comm, workload)


class PipelinePortion(TeamPortion):
    """One rank's stages of a model."""

    def __init__(
        self,
        module: nn.Module,
        division: StageDivision,
        layout: Layout,
        comm: Communicator,
        workload: Workload,
    ) -> None:
        self._division, self._arithmetic = division, workload.arithmetic
        self._names, count = list(module.state_dict()), count_of(module)
        stages, shapes = list(division.stages), division.shapes
        self._layers = [list(stage.layers) for stage in stages]
        ranks, group = LayoutRanks.of(comm, layout.team), TeamMesh(comm, layout.team)
        own = stages[ranks.team.rank]
        used = {tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
        named = chain(module.named_parameters(), module.named_buffers())
        unused = {name: tensor for name, tensor in named if tensor not in used and not ranks.team.rank}
        super().__init__(_Pipe(own, unused, shapes, ranks.team), ranks, lambda _: True, group)
        self.parameters = count
        _give_back(stage for stage in stages if stage is not own)
        division.stages.clear()  # they hold the layers of the other ranks
        self._passes = MicrobatchPasses(division.schedule, own, shapes, group.team.get_group(), workload.loss)
        self.compute = self._compute

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        # Not views: these would be sent with their whole storage.
        values = taken(self.module, of)
        own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        found: dict[str, Any] = {}
        for part in cast("list[dict[str, Any]]", self.ranks.team.all_gather_objects(own)):
            found |= part
        return {name: found[name] for name in self._names if name in found}

    @override
    def record(self) -> PipelineRecord:
        mine, division = (self._passes.idle, self._passes.spans), self._division
        every = cast("list[tuple[float, list[PipelineSpan]]]", self.ranks.team.all_gather_objects(mine))
        spans = since_the_first([span for _, of_rank in every for span in of_rank])
        idle = [share for share, _ in every]
        return PipelineRecord(division.schedule, division.microbatches, self._layers, idle, spans)

    def _compute(self, batch: Batch) -> Computed:
        """Pass a team's batch through the pipeline: equal microbatches, then the rest."""
        arithmetic, count = self._arithmetic, len(batch.targets)
        inputs = cast("Tensor", arithmetic.inputs(batch.inputs))
        targets = arithmetic.targets(batch.targets)
        outputs = _sized(self._division.shapes[-1], count)
        if not count:
            return Computed(0.0, outputs, targets, 0.0)
        size = -(-count // self._division.microbatches)
        whole = count // size * size
        loss = denominator = 0.0
        for part, microbatches in ((slice(0, whole), whole // size), (slice(whole, count), 1)):
            if part.start < part.stop:
                weight = batch.share * (part.stop - part.start) / count / microbatches
                found = self._passes.run(inputs[part], targets[part], microbatches, weight)
                if found is not None:
                    weighted, amount, outputs[part] = found
                    loss, denominator = loss + weighted / batch.share, denominator + amount
        message = torch.cat([outputs.new_tensor([loss, denominator]), outputs.view(-1)])
        self.ranks.team.broadcast(message, self.ranks.team.size - 1)
        seconds = self._passes.done()
        loss, denominator = message[:2].tolist()
        return Computed(loss, message[2:].view(outputs.shape), targets, denominator, seconds)


class Stage(nn.Module):
    """Consecutive blocks of a model."""

    def __init__(self, block: GraphBlock, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.layers, self._block, self._arithmetic = block.layers, block.module, arithmetic

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the last block."""
        # Nothing may change in place what another stage has sent: its gradient is sent back.
        given = inputs.clone() if inputs.requires_grad else inputs
        return self._arithmetic.forward(self._block, given)


class _Pipe(nn.Module):
    """The whole model, for evaluation: samples go from stage to stage, and the outputs to all."""

    def __init__(
        self, own: Stage, unused: dict[str, Tensor], shapes: Sequence[Tensor], team: Communicator
    ) -> None:
        super().__init__()
        for name, layer in (own.layers | unused).items():
            _assign_attr(layer, self, name)
        # In a list, so that the layers are registered once, under the model's own names.
        self._stage, self._shapes, self._team = [own], shapes, team

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the whole model, without gradient (collective over the team)."""
        team, last = self._team, self._team.size - 1
        with torch.no_grad():
            if team.rank:
                inputs = _sized(self._shapes[team.rank], len(inputs))
                team.recv(inputs.view(-1), team.rank - 1)
            outputs = cast("Tensor", self._stage[0](inputs)).contiguous()
            if team.rank != last:
                team.send(outputs.view(-1), team.rank + 1)
                outputs = _sized(self._shapes[-1], len(inputs))
            team.broadcast(outputs.view(-1), last)
        return outputs


def _sized(shape: Tensor, samples: int) -> Tensor:
    """Allocate memory for a number of samples of a shape."""
    return torch.zeros(samples, *shape.shape[1:], dtype=shape.dtype)


def _give_back(stages: Iterable[Stage]) -> None:
    """Free the memory of other ranks' layers."""
    for stage in stages:
        for layer in stage.layers.values():
            if isinstance(layer, nn.Parameter):
                layer.untyped_storage().resize_(0)
        stage.to("meta")
