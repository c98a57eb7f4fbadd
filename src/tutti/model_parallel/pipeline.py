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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain, zip_longest
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.batches import Batch
from tutti.data.columns import Columns
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.base import (
    LayoutRanks,
    Of,
    TeamPortion,
    Workload,
    count_of,
    values_of,
)
from tutti.model_parallel.fx_blocks import Block, blocks_of
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, PeakMemory, held, of_teams, on_meta
from tutti.model_parallel.partition import balance, boundaries, measure
from tutti.model_parallel.places import PORTION, PartPlace, PartPlaces, buffers_in, with_buffers
from tutti.model_parallel.schedules import PLACES_KEPT, MicrobatchPasses, check_microbatches, order, owners
from tutti.records.pipeline import FORWARD, INPUTS, PipelineRecord, PipelineSpan, since_the_first
from tutti.state import Saved, State, name_of, whole_piece
from tutti.training.best_weights import prefix_of
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Computed
from tutti.training.weights import names_in_state

STAGES: Final = "stages"
"""In a state, the name of the first block of each stage and the one behind its last."""


@dataclass(frozen=True)
class StageDivision:
    """The division of a model into the stages of a pipeline.

    Attributes:
        schedule: its name.
        microbatches: the number that a batch is cut into.
        owners: the rank of each stage.
        stages: the blocks of each.
        cuts: the numbers of those blocks.
        shapes: what goes into each stage, and comes out of the last, for a microbatch: on the meta device.
    """

    schedule: str
    microbatches: int
    owners: list[int]
    stages: list[list[Block]]
    cuts: list[slice]
    shapes: list[Tensor]


def divide(
    module: nn.Module,
    schedule: str,
    microbatches: int | None,
    layout: Layout,
    workload: Workload,
    comm: Communicator | None = None,
    before: Sequence[slice] = (),
) -> StageDivision:
    """Divide a model, which stays as it is, into stages by what rank 0 of `comm`, if given, has measured.

    Or as it was divided `before`, if that fits: the order of sums is the same then.

    Raises:
        BadModel: the model's operations cannot be written down, or there are fewer blocks than stages.
        BadOption: the microbatches do not fit the batch or the schedule.
    """
    if workload.arithmetic.layout != "contiguous":
        raise BadOption(
            f"--layout {workload.arithmetic.layout} does not go through a pipeline, whose stages send "
            "contiguous tensors; leave it out, or use another --parallel"
        )
    if isinstance(workload.samples.stored_inputs, Columns) or workload.loss.whole:
        what = "a loss that gets all outputs" if workload.loss.whole else "several inputs, or sequences,"
        raise BadOption(
            f"{what} cannot go through a pipeline, in which one tensor passes from stage to stage; use "
            "--parallel sharded or tensor"
        )
    batch, arithmetic = workload.batch_size // layout.data, workload.arithmetic
    microbatches = check_microbatches(schedule, microbatches, layout.team, batch)
    inputs = cast("Tensor", workload.batch(-(-batch // microbatches))[0])
    blocks, ranks = blocks_of(module, inputs, arithmetic), owners(schedule, layout.team)
    if len(blocks) < len(ranks):
        raise BadModel(
            f"the model has {len(blocks)} part{'' if len(blocks) == 1 else 's'} with weights between which "
            f"one tensor passes, and {len(ranks)} stages ({schedule} on {layout.team} ranks) need one each; "
            "use fewer ranks, another schedule or a deeper model"
        )
    cuts: list[slice] | None = [*before]
    if len(before) != len(ranks) or before[-1].stop != len(blocks):
        measures = comm is None or comm.rank == 0
        cuts = balance(measure(blocks, inputs, arithmetic), len(ranks)) if measures else None
        cuts = cuts if comm is None else cast("list[slice]", comm.broadcast_object(cuts))
    assert cuts is not None, "rank 0 has sent them"
    edges = boundaries(blocks, inputs, arithmetic)
    shapes = [*(edges[part.start] for part in cuts), edges[-1]]
    return StageDivision(schedule, microbatches, ranks, [blocks[part] for part in cuts], cuts, shapes)


def need_of_rank(
    rank: int, division: StageDivision, layout: Layout, workload: Workload, state: float
) -> MemoryNeed:
    """The memory that a rank of a pipeline needs: it is taken through the actions of the schedule."""
    own = {
        number: cast("Stage", on_meta(Stage(division.stages[number], workload.arithmetic)))
        for number, owner in enumerate(division.owners)
        if owner == rank
    }
    shapes, microbatches, last = division.shapes, division.microbatches, len(division.stages) - 1
    targets = workload.batch(len(shapes[0]))[1].to("meta")
    fixed = microbatches * shapes[0].nbytes * (0 in own)
    if PLACES_KEPT:
        places = [number for number in own if number] + [number + 1 for number in own if number < last]
        fixed += microbatches * sum(shapes[place].nbytes for place in places)
    flying: dict[tuple[int, int], Tensor] = {}
    with PeakMemory() as ledger:
        for action in order(division.schedule, layout.team, microbatches, rank):
            key = action.stage, action.microbatch
            if action.kind == FORWARD:
                flying[key] = own[action.stage](_received(shapes[action.stage], action.stage > 0))
                if action.stage == last:
                    flying[key] = workload.loss(flying[key], targets)
            elif action.kind != INPUTS:
                gradient = None if action.stage == last else _received(shapes[action.stage + 1], True)
                torch.autograd.backward(flying.pop(key), gradient)
                del gradient
    return of_teams(layout.data, *held(nn.ModuleList(own.values())), state, ledger.peak + fixed)


def _received(shape: Tensor, from_a_rank: bool) -> Tensor:
    """A tensor that another rank sends, or the samples; what has a place of its own is not counted here."""
    if PLACES_KEPT or not from_a_rank:
        return shape.detach().requires_grad_(from_a_rank)
    return torch.empty_like(shape, requires_grad=from_a_rank)


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
        names, count = list(module.state_dict()), count_of(module)
        stages = [Stage(blocks, workload.arithmetic) for blocks in division.stages]
        self._known = {tensor: name for name, tensor in _named_tensors(module)}
        self._in_state = names_in_state(module)
        self._layers, state = [list(stage.layers) for stage in stages], state_by_stage(module, stages)
        ranks, group = LayoutRanks.of(comm, layout.team), TeamMesh(comm, layout.team)
        owners, shapes, team = division.owners, division.shapes, ranks.team
        own = {number: stages[number] for number, rank in enumerate(owners) if rank == team.rank}
        self._names, self._state = names, {number: state[number] for number in own}
        used = {tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())}
        unused = {name: tensor for tensor, name in self._known.items() if tensor not in used}
        self._unused = unused if 0 in own else {}
        super().__init__(_Pipe(own, owners, shapes, team), ranks, lambda _: True, group)
        self.parameters = count
        _give_back(stage for number, stage in enumerate(stages) if number not in own)
        division.stages.clear()  # they hold the layers of the other ranks
        self._passes = MicrobatchPasses(division.schedule, own, shapes, group.team.get_group(), workload.loss)
        self.compute = self._compute

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        # Not views: these would be sent with all that they are views of.
        own = {name: of(x).clone() for state in self._state.values() for name, x in state.items()}
        found: dict[str, Tensor] = {}
        for part in cast("list[dict[str, Tensor]]", self.ranks.team.all_gather_objects(own)):
            found |= part
        return {name: found[name] for name in self._names if name in found}

    @cached_property
    @override
    def places(self) -> PartPlaces:
        # A tied parameter may have another name where only some of its layers are.
        named = {name: (self._known[p], p) for name, p in self.module.named_parameters()}
        return PartPlaces({name: PartPlace.whole(whole, p) for name, (whole, p) in named.items()})

    @override
    def to_whole(self, state: State) -> State:
        known, training, data = self._buffer_names, state.shared["training"], self.ranks.data
        found = super().to_whole(state)
        if data.rank == 0:
            # They have been in all epochs what they are now.
            prefixes = ["weights", *(prefix_of(epoch) for epoch in state.shared["best"].get("buffers", {}))]
            found.joint.pieces += [
                whole_piece(name_of(prefix, name), tensor)
                for name, tensor in self._unused.items()
                if isinstance(tensor, nn.Parameter)
                for prefix in prefixes
            ]
        rest = {name: tensor for name, tensor in self._unused.items() if not isinstance(tensor, nn.Parameter)}
        own = [{known[name]: x for name, x in held.items()} | rest for held in buffers_in(state.shared)]
        groups = [[self.places.whole_name(name) for name in names] for names in training["groups"]]
        # Not views: these would be sent with all that they are views of.
        mine = [{name: x.clone() for name, x in held.items()} for held in own], groups
        every = cast(
            "list[tuple[list[dict[str, Tensor]], list[list[str]]]]", self.ranks.team.all_gather_objects(mine)
        )
        buffers = [reduce(dict.__or__, held) for held in zip(*(held for held, _ in every), strict=True)]
        order = {name: number for number, name in enumerate(self._known.values())}
        merged = [
            sorted((name for names in parts for name in names), key=order.__getitem__)
            for parts in zip_longest(*(groups for _, groups in every), fillvalue=[])
        ]
        about = {**found.shared[PORTION], STAGES: [[cut.start, cut.stop] for cut in self._division.cuts]}
        shared = {**with_buffers(found.shared, buffers), PORTION: about}
        shared["training"] |= {"groups": merged, "names": self._in_state}
        return replace(found, shared=shared)

    @override
    def to_portion(self, saved: Saved) -> Saved:
        known = self._buffer_names
        held = [{own: buffers[name] for own, name in known.items()} for buffers in buffers_in(saved.shared)]
        return replace(super().to_portion(saved), shared=with_buffers(saved.shared, held))

    @property
    def _buffer_names(self) -> dict[str, str]:
        """The names of this rank's buffers in the whole model, by those in its portion."""
        return {name: self._known[buffer] for name, buffer in self.module.named_buffers()}

    @override
    def record(self) -> PipelineRecord:
        mine, division = (self._passes.idle, self._passes.spans), self._division
        every = cast("list[tuple[float, list[PipelineSpan]]]", self.ranks.team.all_gather_objects(mine))
        return PipelineRecord(
            division.schedule,
            division.microbatches,
            list(division.owners),
            self._layers,
            [idle for idle, _ in every],
            since_the_first([span for _, spans in every for span in spans]),
        )

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

    def __init__(self, blocks: Sequence[Block], arithmetic: Arithmetic) -> None:
        super().__init__()
        block = reduce(Block.then, blocks)
        self.layers, self._block, self._arithmetic = block.layers, block.module, arithmetic

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the last block."""
        outputs = self._arithmetic.forward(self._block, inputs)
        # Schedules that split the backward pass detach in place what leaves a stage, which no view allows.
        return outputs.clone() if outputs._is_view() else outputs


def state_by_stage(module: nn.Module, stages: Sequence[Stage]) -> list[dict[str, Tensor]]:
    """The parameters and buffers of each stage by name; the first one also has what no stage uses."""
    held = {
        tensor: number
        for number in reversed(range(len(stages)))
        for tensor in (*stages[number].parameters(), *stages[number].buffers())
    }
    found: list[dict[str, Tensor]] = [{} for _ in stages]
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found[held.get(value, 0)][name] = value
    return found


class _Pipe(nn.Module):
    """The whole model, for evaluation: samples go from stage to stage, and the outputs to all."""

    def __init__(
        self, own: dict[int, Stage], owners: Sequence[int], shapes: Sequence[Tensor], team: Communicator
    ) -> None:
        super().__init__()
        for stage in own.values():
            for name, layer in stage.layers.items():
                _add(self, name, layer)
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


def _add(module: nn.Module, name: str, layer: nn.Module | Tensor) -> None:
    """Add a layer under a name with dots, so that its tensors have the names of the whole model."""
    *path, last = name.split(".")
    for part in path:
        inner = module._modules.get(part)
        if inner is None:
            inner = nn.Module()
            module.add_module(part, inner)
        module = inner
    if isinstance(layer, nn.Module):
        module.add_module(last, layer)
    elif isinstance(layer, nn.Parameter):
        module.register_parameter(last, layer)
    else:
        module.register_buffer(last, layer)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


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
