"""Pipeline parallelism: every rank has some of the layers, and batches pass through in small parts.

    rank 0   F0 F1    B0 F2 B1 F3 B2    B3          forward and backward of microbatches 0 to 3
    rank 1      F0 B0 F1 B1 F2 B2 F3 B3             (1f1b: backward as soon as may be)

What a rank waits at the beginning and at the end of a batch is the bubble. The more microbatches, the smaller
it is; the schedules differ in how small, and in how many activations a rank keeps. PyTorch's `pipelining` has
them:

    gpipe        all forward passes, then all backward passes: the most memory
    1f1b         one forward, one backward in turn
    interleaved  the same with two stages for each rank: half the bubble, twice the messages
    zero_bubble  gradients of inputs first, those of weights where a rank would wait
    zbv          that with two stages for each rank, laid out as a V: the first rank has the last stage too

Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3; Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2; Qi et al. 2023, "Zero
Bubble Pipeline Parallelism".
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
from tutti.model_parallel.base import (
    LayoutRanks,
    Of,
    TeamPortion,
    Workload,
    count_of,
    taken,
    values_of,
)
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, PeakMemory, held, of_teams, on_meta
from tutti.model_parallel.schedules import MicrobatchPasses, check_microbatches, in_flight, owners
from tutti.model_parallel.stages import GraphBlock, stages_of
from tutti.records.pipeline import PipelineRecord, PipelineSpan, since_the_first
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Computed


@dataclass(frozen=True)
class StageDivision:
    """The division of a model into the stages of a pipeline.

    Attributes:
        schedule: its name.
        microbatches: the number that a batch is cut into.
        owners: the rank of each stage.
        stages: by number.
        shapes: what goes into each stage, and comes out of the last, for a microbatch: on the meta device.
    """

    schedule: str
    microbatches: int
    owners: list[int]
    stages: list[Stage]
    shapes: list[Tensor]


def divide(layout: Layout, module: nn.Module, workload: Workload) -> StageDivision:
    """Divide a model, which stays as it is, into stages; every rank finds the same.

    Raises:
        BadModel: the model's forward cannot be traced, or there are fewer blocks than stages.
        BadOption: the microbatches do not fit the batch or the schedule.
    """
    arithmetic, schedule = workload.arithmetic, layout.options.schedule
    if arithmetic.layout != "contiguous":
        raise BadOption(
            f"--layout {arithmetic.layout} does not go through a pipeline, whose stages send "
            "contiguous tensors; leave it out, or use another --parallel"
        )
    if isinstance(workload.samples.stored_inputs, Columns) or workload.loss.whole:
        what = "a loss that gets all outputs" if workload.loss.whole else "several inputs, or sequences,"
        raise BadOption(
            f"{what} cannot go through a pipeline, in which one tensor passes from stage to stage; use "
            "--parallel sharded or tensor"
        )
    batch = workload.batch_size // layout.data
    microbatches = check_microbatches(schedule, layout.options.microbatches, layout.team, batch)
    inputs = cast("Tensor", workload.batch(-(-batch // microbatches))[0])
    ranks = owners(schedule, layout.team)
    blocks, shapes = stages_of(module, inputs, arithmetic, len(ranks))
    return StageDivision(schedule, microbatches, ranks, [Stage(one, arithmetic) for one in blocks], shapes)


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the need of the rank that needs the most."""
    division = divide(layout, module, workload)
    needs = [_need_of_rank(rank, division, layout, workload, state) for rank in range(layout.team)]
    return max(needs, key=lambda need: need.total)


def _need_of_rank(
    rank: int, division: StageDivision, layout: Layout, workload: Workload, state: float
) -> MemoryNeed:
    """Return the need of one backward pass, all other microbatches in flight being kept."""
    own = {
        number: cast("Stage", on_meta(division.stages[number]))
        for number, owner in enumerate(division.owners)
        if owner == rank
    }
    shapes, microbatches, stages = division.shapes, division.microbatches, len(division.stages)
    targets = workload.batch(len(shapes[0]))[1].to("meta")
    flying: list[Tensor] = []
    with PeakMemory() as ledger:
        for number, stage in own.items():
            for _ in range(in_flight(division.schedule, microbatches, number, stages)):
                inputs = torch.empty_like(shapes[number], requires_grad=True) if number else shapes[0]
                outputs = stage(inputs)
                flying.append(workload.loss(outputs, targets) if number == stages - 1 else outputs)
        last = flying.pop()
        torch.autograd.backward(last, None if stages - 1 in own else torch.empty_like(last))
    # Places for what is received: for all microbatches, those of inputs in flight counted above.
    places = sum(microbatches * shapes[number + 1].nbytes for number in own if number + 1 < stages)
    for number in own:
        flown = in_flight(division.schedule, microbatches, number, stages) if number else 0
        places += (microbatches - flown) * shapes[number].nbytes
    return of_teams(layout.data, *held(nn.ModuleList(own.values())), state, ledger.peak + places)


def portion(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> PipelinePortion:
    """Make this rank's stages of a model (collective)."""
    return PipelinePortion(module, divide(layout, module, workload), layout, comm, workload)


class PipelinePortion(TeamPortion):
    """The stages that one rank has of a model."""

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
        stages = list(division.stages)
        self._layers = [list(stage.layers) for stage in stages]
        ranks, group = LayoutRanks.of(comm, layout.team), TeamMesh(comm, layout.team)
        owners, shapes, team = division.owners, division.shapes, ranks.team
        own = {number: stages[number] for number, rank in enumerate(owners) if rank == team.rank}
        used = {tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
        named = chain(module.named_parameters(), module.named_buffers())
        unused = {name: tensor for name, tensor in named if tensor not in used} if 0 in own else {}
        super().__init__(_Pipe(own, unused, owners, shapes, team), ranks, lambda _: True, group)
        self.parameters = count
        _give_back(stage for number, stage in enumerate(stages) if number not in own)
        division.stages.clear()  # they hold the layers of the other ranks
        self._passes = MicrobatchPasses(division.schedule, own, shapes, group.team.get_group(), workload.loss)
        self.compute = self._compute

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        # Not views: these would be sent with all that they are views of.
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
        idle, owners = [share for share, _ in every], list(division.owners)
        return PipelineRecord(division.schedule, division.microbatches, owners, self._layers, idle, spans)

    def _compute(self, batch: Batch) -> Computed:
        """Pass a team's batch through the pipeline: equal microbatches, then what is left."""
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
        last = self._division.owners[-1]
        message = torch.cat([outputs.new_tensor([loss, denominator]), outputs.view(-1)])
        self.ranks.team.broadcast(message, last)
        seconds = self._passes.done()
        loss, denominator = message[:2].tolist()
        return Computed(loss, message[2:].view(outputs.shape), targets, denominator, seconds)


class Stage(nn.Module):
    """Consecutive blocks of a model.

    Attributes:
        layers: modules, parameters and buffers by their names in the model.
    """

    def __init__(self, block: GraphBlock, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.layers, self._block, self._arithmetic = block.layers, block.module, arithmetic

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the last block."""
        # Nothing may change in place what another stage has sent: its gradient is sent back.
        given = inputs.clone() if inputs.requires_grad else inputs
        outputs = self._arithmetic.forward(self._block, given)
        # Schedules that split the backward pass detach in place what leaves a stage, which no view allows.
        return outputs.clone() if outputs._is_view() else outputs


class _Pipe(nn.Module):
    """The whole model, for evaluation: samples go from stage to stage, and the outputs to all."""

    def __init__(
        self,
        own: dict[int, Stage],
        unused: dict[str, Tensor],
        owners: Sequence[int],
        shapes: Sequence[Tensor],
        team: Communicator,
    ) -> None:
        super().__init__()
        for layers in (*(stage.layers for stage in own.values()), unused):
            for name, layer in layers.items():
                _assign_attr(layer, self, name)
        self._own, self._owners, self._shapes, self._team = own, owners, shapes, team

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the whole model, without gradient (collective over the team)."""
        values, rank = inputs, self._team.rank
        with torch.no_grad():
            for number, owner in enumerate(self._owners):
                before = self._owners[number - 1] if number else owner
                if before != owner and rank == before:
                    self._team.send(values.contiguous().view(-1), owner)
                if before != owner and rank == owner:
                    values = _sized(self._shapes[number], len(inputs))
                    self._team.recv(values.view(-1), before)
                if rank == owner:
                    values = self._own[number](values)
            last = self._owners[-1]
            outputs = values.contiguous() if rank == last else _sized(self._shapes[-1], len(inputs))
            self._team.broadcast(outputs.view(-1), last)
        return outputs


def _sized(shape: Tensor, samples: int) -> Tensor:
    """Memory for a number of samples of a shape."""
    return torch.zeros(samples, *shape.shape[1:], dtype=shape.dtype)


def _give_back(stages: Iterable[Stage]) -> None:
    """Free the memory of layers that other ranks have."""
    for stage in stages:
        for layer in stage.layers.values():
            if isinstance(layer, nn.Parameter):
                layer.untyped_storage().resize_(0)
        stage.to("meta")
