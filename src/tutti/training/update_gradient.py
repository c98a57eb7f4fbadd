"""The gradient of an update: forward and backward of this rank's samples, and their denominator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from tutti.comm.base import Communicator
from tutti.data.batches import Batch
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.training.batch_norm import BatchStatistics
from tutti.training.dropout import SampleMasks
from tutti.training.evaluation import Objective, Tally
from tutti.training.finite import LossScale, SkippedUpdates, refuse_loss
from tutti.training.run_parts import Computed, Schedule, Workers
from tutti.training.timers import StageTimer

LOOK_STEPS: Final = 100
"""Steps between two looks at the losses of a GPU: each look waits for the GPU."""

FORWARD: Final = 1 / 3
"""The share of a forward pass in the virtual seconds of a sample: a backward pass has twice the products."""


class UpdateGradient:
    """Adds up the gradients of an update in the replica.

    Attributes:
        scale: of the loss, with fp16.
        skipped: decides which updates are skipped.
        masks: of dropout.
    """

    def __init__(
        self, workers: Workers, objective: Objective, schedule: Schedule, stages: StageTimer
    ) -> None:
        self._comm, self._replica, self._worker = workers.comm, workers.replica, workers.worker
        self._compute_batch = workers.compute or self._forward_backward
        self._collective, self._seconds_per_sample = workers.collective, workers.seconds_per_sample
        self._statistics = workers.statistics
        self.objective, self._batches, self._stages = objective, schedule.batches, stages
        self._shares: dict[float, Tensor] = {}
        self._checked = 0
        self.scale = LossScale() if objective.arithmetic.precision == "fp16" else None
        self._sharing = workers.sharing(self._batches)
        together = self._sharing if self._worker.waits else None
        if objective.loss.weighed and self._sharing is not None and together is None:
            raise BadOption(
                "the loss weighs samples or leaves some out, so that its denominator needs all workers, but "
                "option 'quorum' is below 1; use '--strategy.quorum 1'"
            )
        self.skipped = SkippedUpdates(
            self._replica, self._comm, together, schedule.skip_nonfinite, self.scale
        )
        self.masks = SampleMasks(schedule.batches.seed)

    def add(self, passes: Sequence[Batch], step: int, epoch: int, tally: Tally) -> tuple[int, float]:
        """Compute the gradient of this rank's part of an update; return its samples, and their weight."""
        samples, weight = 0, 0.0
        for batch in passes:
            if batch.share or self._collective or self._statistics is not None:
                computed, of_losses = self._pass(batch, step, epoch, tally)
                samples, weight = samples + computed, weight + of_losses
        if isinstance(tally.loss, Tensor):
            if step + 1 - self._checked >= LOOK_STEPS:
                self.check_losses(tally.loss, step + 1, epoch)
            self._stages.lap("backward")
        self._charge(samples)
        return samples, weight

    def check_losses(self, total: Tensor, step: int, epoch: int) -> None:
        """Wait for the sum of a GPU's losses after `step` steps, and refuse one that is not finite."""
        first, self._checked = self._checked + 1, step
        loss = total.item()
        if not math.isfinite(loss):
            refuse_loss(self._replica, self._comm.rank, loss, epoch, f"steps {first} to {step}")
        self._stages.lap("backward")

    def is_usable(self, passes: Sequence[Batch], step: int, epoch: int, samples: int, weight: float) -> bool:
        """Prepare the gradient for the worker's step; return whether to make it (collective).

        `samples` and `weight` are what `add` returned.
        """
        usable = self.skipped.is_usable(step + 1, epoch)
        if usable:
            self._divide(passes, samples, weight)
        return usable

    def _divide(self, passes: Sequence[Batch], samples: int, weight: float) -> None:
        """Set the worker's share of the update; divide by the loss's own denominator, if it has one."""
        worker, own = self._worker, self._batches.own
        if not own:
            worker.share = sum(batch.share for batch in passes)
        if not self.objective.loss.weighed:
            return
        whole, _ = divide_by_weight(self._replica, self._sharing, weight, samples)
        # Without any label the gradient is zero, and the share of the samples will do.
        if not own and whole:
            worker.share = weight / whole

    def _pass(self, batch: Batch, step: int, epoch: int, tally: Tally) -> tuple[int, float]:
        """Add this batch's gradient; return its samples, and the denominator of its losses."""
        self.masks.begin(epoch, batch.samples)
        computed = self._compute_batch(batch)
        samples = len(computed.targets)
        weight = samples if computed.weight is None else computed.weight
        loss = computed.loss
        if not isinstance(loss, float) or math.isfinite(loss):
            tally.add(loss, computed.outputs, computed.targets, weight, batch.weights)
        elif self.skipped.catches_losses:
            self.skipped.note_loss(loss)
        else:
            refuse_loss(self._replica, self._comm.rank, loss, epoch, f"step {step + 1}")
        self._stages.lap("backward", computed.seconds)
        return samples, weight

    def _forward_backward(self, batch: Batch) -> Computed:
        """Add this batch's gradient, weighted by its share of the update."""
        if not batch.share and self._statistics is not None:
            return self._absent(self._statistics)
        arithmetic = self.objective.arithmetic
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        self._stages.lap("copy")
        computed = self.objective.compute(self._replica.module, inputs, targets, batch.weights)
        self._stages.lap("forward")
        # Backward from the share gives the gradient of loss * share, and saves a multiplication.
        factor = batch.share if self.scale is None else batch.share * self.scale.factor
        share = self._shares.get(factor)
        if share is None:
            share = self._shares[factor] = computed.loss.new_tensor(factor)
        # `torch.autograd.backward` imports sympy to compare the two shapes: a third of a second before the
        # first step, and microseconds in each.
        _engine_run_backward(
            (computed.loss,), (share,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return Computed(
            arithmetic.number(computed.reported), computed.outputs.detach(), targets, computed.weight
        )

    def _absent(self, statistics: BatchStatistics) -> Computed:
        """Take part in the statistics of a batch with a sample that does not count."""
        arithmetic = self.objective.arithmetic
        inputs, targets = self._batches.part.take(torch.zeros(1, dtype=torch.int64))
        inputs, targets = arithmetic.inputs(inputs), arithmetic.targets(targets)
        with statistics.absent():
            computed = self.objective.compute(self._replica.module, inputs, targets)
            torch.autograd.backward(computed.loss, torch.zeros_like(computed.loss))
        return Computed(0.0, computed.outputs.detach()[:0], targets[:0], 0.0)

    def _charge(self, samples: int) -> None:
        """Advance the virtual clock, if there is one, by the cost of the samples."""
        # After computing: the clock gives the turn to other ranks, which may move shared weights.
        cost = self._seconds_per_sample
        if cost is not None:
            seconds = cost(samples) if callable(cost) else cost * samples
            for stage, share in (("forward", FORWARD), ("backward", 1 - FORWARD)):
                self._comm.compute(seconds * share)
                self._stages.lap(stage)


def divide_by_weight(
    replica: Replica, comm: Communicator | None, weight: float, samples: int
) -> tuple[float, float]:
    """Divide an update's gradient by the loss's own denominator (collective over `comm`).

    Each pass has added the gradient of its sum of losses / samples of the update. `weight` and `samples` are
    this rank's; `comm` is None where each rank makes its own updates. Return the update's weight and samples.
    Without any weight the gradients become zero.
    """
    totals = torch.tensor([weight, samples], dtype=torch.float64)
    if comm is not None:
        comm.all_reduce(totals)
    whole, count = totals.tolist()
    replica.gradients.scale(count / whole if whole else 0.0)
    return whole, count
