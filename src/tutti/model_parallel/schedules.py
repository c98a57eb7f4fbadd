"""Batches through a pipeline, by the schedules of `torch.distributed.pipelining`, and their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from typing_extensions import override

from tutti.errors import BadOption
from tutti.records.pipeline import BACKWARD, FORWARD, KINDS, PipelineSpan
from tutti.training.evaluation import Objective
from tutti.training.losses import Loss


def check_microbatches(schedule: str, count: int | None, ranks: int, batch: int) -> int:
    """Return the number of microbatches of a batch; BadOption if `count` does not fit."""
    if count is None:
        return max(1, min(2 * ranks, batch))
    if count > batch:
        raise BadOption(
            f"--parallel.microbatches is {count}, but a pipeline gets {batch} samples of a batch; give at "
            f"most {batch}, or a larger --batch-size"
        )
    if schedule == "1f1b" and count < ranks:
        raise BadOption(
            f"--parallel.microbatches is {count}, which schedule {schedule} cannot do on {ranks} "
            f"ranks; give at least {ranks}, or use --parallel.schedule gpipe"
        )
    return count


def in_flight(schedule: str, microbatches: int, stage: int, stages: int) -> int:
    """Return (an upper bound on) the microbatches whose activations a stage keeps at one time."""
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


class MicrobatchPasses:
    """The passes of batches through the stages of a team."""

    def __init__(
        self, schedule: str, stage: nn.Module, shapes: Sequence[Tensor], group: ProcessGroup, loss: Loss
    ) -> None:
        self._schedule, self._module, self._shapes = schedule, stage, shapes
        self._group, self._objective, self._weight = group, Objective(loss), 0.0
        self._reported = self._denominator = 0.0
        self._made: dict[tuple[int, int], Any] = {}
        self._began, self._latest = monotonic(), list[PipelineSpan]()
        # The work of this rank in the last whole step, and the share of its time that it waited there.
        self.spans, self.idle = list[PipelineSpan](), 0.0

    def run(
        self, inputs: Tensor, targets: Tensor, microbatches: int, weight: float
    ) -> tuple[float, float, Tensor] | None:
        """Run forward and backward of equal microbatches (collective over the team).

        The loss of each counts `weight`; gradients accumulate. Return, on the last rank, the weighted sum of
        the losses, the sum of their denominators, and the outputs.
        """
        if not self._latest:
            self._began = monotonic()
        size, self._weight = len(inputs) // microbatches, weight
        schedule = self._made.get((microbatches, size)) or self._make(microbatches, size)
        # Each has places for what it receives: only the largest is kept, for what is left of a batch is rare.
        if all(microbatches * size >= count * each for count, each in self._made):
            self._made = {(microbatches, size): schedule}
        self._reported = self._denominator = 0.0
        rank, last = self._group.rank(), self._group.rank() == self._group.size() - 1
        first = () if rank else (inputs,)
        outputs = schedule.step(*first, target=targets if last else None)
        if not last:
            return None
        return self._reported, self._denominator, self._objective.loss.in_units(outputs.detach())

    def done(self) -> dict[str, float]:
        """End a step; return its seconds of forward passes and of waiting."""
        total = monotonic() - self._began
        spent = dict.fromkeys(KINDS, 0.0)
        for span in self._latest:
            spent[span.kind] += span.stop - span.start
        wait = max(0.0, total - sum(spent.values()))
        if len(self._latest) >= len(self.spans):
            self.spans, self.idle = self._latest.copy(), wait / total
        self._latest.clear()
        return {"forward": spent[FORWARD], "wait": wait}

    def _weighted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = self._objective.measure(outputs, targets)
        self._reported += found.reported.item() * self._weight
        self._denominator += found.weight
        return found.loss * self._weight

    def _make(self, microbatches: int, size: int) -> Any:
        rank, ranks = self._group.rank(), self._group.size()
        stage = _TimedStage(
            self._module,
            rank,
            ranks,
            torch.device("cpu"),
            input_args=self._example(rank, size),
            output_args=self._example(rank + 1, size),
            group=self._group,
        )
        stage.spans = self._latest
        # What is left of a batch may have fewer microbatches than 1f1b needs.
        kind = ScheduleGPipe if self._schedule == "gpipe" or microbatches < ranks else Schedule1F1B
        return kind(stage, microbatches, loss_fn=self._weighted, scale_grads=False)

    def _example(self, edge: int, size: int) -> Tensor:
        """Return an example of the tensor between two stages; all but the model's inputs have a gradient."""
        shape = self._shapes[edge]
        return torch.empty(size, *shape.shape[1:], dtype=shape.dtype, requires_grad=edge > 0)


class _TimedStage(PipelineStage):
    """A stage that records the times of its passes."""

    spans: list[PipelineSpan]

    @contextmanager
    def _noted(self, kind: str, microbatch: int) -> Iterator[None]:
        start = monotonic()
        yield
        self.spans.append(PipelineSpan(self.group_rank, kind, microbatch, start, monotonic()))

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with self._noted(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **more)

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> None:
        with self._noted(BACKWARD, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **more)
