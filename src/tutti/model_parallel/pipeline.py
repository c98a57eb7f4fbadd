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
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.batches import Batch
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.base import LayoutRanks, Of, Portion, Workload, count_of, values_of
from tutti.model_parallel.fx_blocks import Block, blocks_of
from tutti.model_parallel.group import TeamMesh
from tutti.model_parallel.layout import Layout, Pipeline
from tutti.model_parallel.partition import balance, boundaries, measure
from tutti.model_parallel.schedules import MicrobatchPasses, check_microbatches, owners
from tutti.model_parallel.updates import Gradients, worker_of
from tutti.records.pipeline import PipelineRecord, since_the_first
from tutti.replica import Replica
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.strategies.placement import place
from tutti.training.precision import Arithmetic
from tutti.training.trainer import Computed


class PipelinePortion(Portion):
    """The stages that one rank has of a model.

    Args:
        module: the model, alike on all ranks. Its other layers are given back.
        layout: who holds what, and the schedule.
        comm: all ranks of the job (collective).
        workload: the samples and the loss.

    Raises:
        BadModel: the model's operations cannot be written down, or there are fewer blocks than stages.
        BadOption: the microbatches do not fit the batch or the schedule.
    """

    def __init__(self, module: nn.Module, layout: Layout, comm: Communicator, workload: Workload) -> None:
        assert isinstance(layout.options, Pipeline)
        self._schedule, self._learning, self.parameters = layout.options.schedule, workload, count_of(module)
        _refuse_arithmetic(workload.arithmetic)
        batch = workload.batch_size // layout.data
        self._microbatches = check_microbatches(layout.options, layout.team, batch)
        self._owners = owners(self._schedule, layout.team)
        inputs = workload.batch(-(-batch // self._microbatches))[0]
        blocks = enough(blocks_of(module, inputs, workload.arithmetic), layout)
        cuts = _agreed_cuts(comm, blocks, inputs, workload.arithmetic, len(self._owners))
        edges = boundaries(blocks, inputs, workload.arithmetic)
        shapes = [edges[part.start] for part in cuts] + [edges[-1]]
        stages = [Stage(blocks[part], workload.arithmetic) for part in cuts]
        self._layers = [list(stage.layers) for stage in stages]
        self._names, state = list(module.state_dict()), state_by_stage(module, stages)
        self._ranks, self._group = LayoutRanks.of(layout, comm), TeamMesh(layout, comm)
        self.peers = self.data = self._ranks.data
        team = self._ranks.team
        own = {number: stages[number] for number, rank in enumerate(self._owners) if rank == team.rank}
        self._state = {number: state[number] for number in own}
        self.module = _Pipe(own, self._owners, shapes, team)
        _give_back(stage for number, stage in enumerate(stages) if number not in own)
        group = self._group.team.get_group()
        self._passes = MicrobatchPasses(self._schedule, own, shapes, group, workload.loss)
        self._gradients = Gradients(self.module, lambda _: True)
        self._shapes = shapes
        self.compute = self._compute

    @override
    def place(self, strategy: Strategy) -> Replica:
        return place(self.module, self._ranks.data, strategy.home)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return worker_of(strategy, replica, self._ranks, optimizer, clip, self._gradients)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        # Not views: these would be sent with all that they are views of.
        own = {name: of(x).clone() for state in self._state.values() for name, x in state.items()}
        found: dict[str, Tensor] = {}
        for part in cast("list[dict[str, Tensor]]", self._ranks.team.all_gather_objects(own)):
            found |= part
        return {name: found[name] for name in self._names if name in found}

    @override
    def record(self) -> PipelineRecord:
        mine = self._passes.busy, self._passes.spans
        every = cast("list[tuple[Any, Any]]", self._ranks.team.all_gather_objects(mine))
        return PipelineRecord(
            self._schedule,
            self._microbatches,
            list(self._owners),
            self._layers,
            [busy.idle for busy, _ in every],
            since_the_first([span for _, spans in every for span in spans]),
        )

    @override
    def close(self) -> None:
        self._group.close()
        self._ranks.close()

    def _compute(self, batch: Batch) -> Computed:
        """Pass a team's batch through the pipeline: equal microbatches, then what is left."""
        arithmetic, count = self._learning.arithmetic, len(batch.targets)
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        outputs = _sized(self._shapes[-1], count)
        if not count:
            return Computed(0.0, outputs, targets, 0.0)
        size = -(-count // self._microbatches)
        whole = count // size * size
        loss = denominator = 0.0
        for part, microbatches in ((slice(0, whole), whole // size), (slice(whole, count), 1)):
            if part.start < part.stop:
                weight = batch.share * (part.stop - part.start) / count / microbatches
                found = self._passes.run(inputs[part], targets[part], microbatches, weight)
                if found is not None:
                    loss += found.loss / batch.share
                    denominator += found.denominator
                    outputs[part] = found.outputs
        last = self._owners[-1]
        message = torch.cat([outputs.new_tensor([loss, denominator]), outputs.view(-1)])
        self._ranks.team.broadcast(message, last)
        seconds = self._passes.done()
        loss, denominator = message[:2].tolist()
        return Computed(loss, message[2:].view(outputs.shape), targets, denominator, seconds)


class Stage(nn.Module):
    """Consecutive blocks of a model.

    Args:
        blocks: what they are.
        arithmetic: how they compute; what leaves the stage is in full precision.

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
    """The whole model, for evaluation: samples go from stage to stage, and the outputs to all.

    Args:
        own: this rank's stages by number.
        owners: the rank of each stage.
        shapes: what goes into each stage, and comes out of the last, for some number of samples.
        team: the ranks that have the stages.
    """

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
    """Add a layer under a name with dots, so that its parameters have the names of the whole model."""
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


def _sized(shape: Tensor, samples: int) -> Tensor:
    """Memory for a number of samples of a shape."""
    return torch.zeros(samples, *shape.shape[1:], dtype=shape.dtype)


def enough(blocks: list[Block], layout: Layout) -> list[Block]:
    """The blocks, if there is one for each stage.

    Raises:
        BadModel: there are too few.
    """
    assert isinstance(layout.options, Pipeline)
    stages = layout.team * layout.options.stages_per_rank
    if len(blocks) < stages:
        raise BadModel(
            f"the model has {len(blocks)} part{'' if len(blocks) == 1 else 's'} with weights between which "
            f"one tensor passes, and {stages} stages ({layout.options.schedule} on {layout.team} ranks) need "
            "one each; use fewer ranks, another schedule or a deeper model"
        )
    return blocks


def _agreed_cuts(
    comm: Communicator, blocks: Sequence[Block], inputs: Tensor, arithmetic: Arithmetic, stages: int
) -> list[slice]:
    """The blocks of each stage, as rank 0 has measured them (collective)."""
    cuts = balance(measure(blocks, inputs, arithmetic), stages) if comm.rank == 0 else None
    return cast("list[slice]", comm.broadcast_object(cuts))


def _give_back(stages: Iterable[Stage]) -> None:
    """Free the memory of layers that other ranks have."""
    for stage in stages:
        for layer in stage.layers.values():
            if isinstance(layer, nn.Parameter):
                layer.untyped_storage().resize_(0)
        stage.to("meta")


def _refuse_arithmetic(arithmetic: Arithmetic) -> None:
    if arithmetic.layout != "contiguous":
        raise BadOption(
            f"--layout {arithmetic.layout} does not go through a pipeline, whose stages send contiguous "
            "tensors; leave it out, or use another --parallel"
        )
