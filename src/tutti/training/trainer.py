"""The training loop: forward, backward, the strategy's step, and what is to be known about them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Final, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.comm.base import Communicator
from tutti.data.batches import Batch, Batches
from tutti.errors import NotFinite
from tutti.records.heartbeat import VALIDATING, WAITING
from tutti.records.run import EpochRecord, Evaluation, RankRecord, now
from tutti.records.texts import RunLength
from tutti.records.trace import Trace
from tutti.replica import Replica
from tutti.strategies.base import Worker
from tutti.training.balance import SpeedBalance
from tutti.training.evaluation import Objective, Tally, average_buffers
from tutti.training.finite_check import FiniteCheck, RunningSum
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.progress import Moment, Progress
from tutti.training.timers import EXCHANGE, StageTimer, look_s
from tutti.training.validation import VALIDATIONS, Validation, ValidationPlan, ValidationTask

FORWARD: Final = 1 / 3
"""The share of a forward pass in the virtual seconds of a sample: a backward pass has twice the products."""


@dataclass(frozen=True)
class Computed:
    """What forward and backward of a batch gave, the gradients aside.

    Attributes:
        loss: the sum of the losses / the samples; 0 without any. A scalar on a GPU, for which nobody has
            waited yet.
        outputs: of the model, of shape (samples, ...), without gradient.
        targets: of shape (samples, ...), where the outputs are.
        weight: the denominator of the losses; None: the samples.
        seconds: what of its time belongs to other stages than backward.
    """

    loss: float | Tensor
    outputs: Tensor
    targets: Tensor
    weight: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


Compute = Callable[[Batch], Computed]
"""Adds the gradient of a batch, weighted by its share of the update, to that which is there."""


@dataclass(frozen=True)
class Workers:
    """The workers of a run, as one of them sees them.

    Attributes:
        comm: the ranks over which samples are dealt: all of the job, unless several hold one model together.
        replica: the model.
        worker: this rank's part in the strategy.
        optimizer: the user's optimizer that `worker` was made with; its learning rate is recorded.
        compute: forward and backward of a batch; None: the replica's module gives outputs, and these the
            loss.
        collective: several ranks compute together, so also a batch without samples.
        everyone: all ranks of the job, each of which has its place in the records; None: those of `comm`.
        seconds_per_sample: what forward and backward of a sample cost on the virtual clock; with it, that
            clock measures all times. None: time is real.
    """

    comm: Communicator
    replica: Replica
    worker: Worker
    optimizer: Optimizer
    compute: Compute | None = None
    collective: bool = False
    everyone: Communicator | None = None
    seconds_per_sample: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The updates of a run.

    Attributes:
        batches: this rank's training batches; `comm.size` ranks, the strategy's passes, and `own` unless the
            strategy's workers make one update together. Or a queue that deals such own batches.
        epochs: passes over the training samples; or
        steps: weight updates (of each rank, where each makes its own), the last epoch ending in the middle if
            need be. Give one of the two.
        lr: a learning-rate scheduler of torch, stepped after each update; where each rank makes its own,
            after each round of them.
        balance: splits each update over the ranks by their speeds.
    """

    batches: Batches
    epochs: int | None = None
    steps: int | None = None
    lr: LRScheduler | None = None
    balance: SpeedBalance | None = None

    @property
    def updates(self) -> int:
        """The number of weight updates that the run makes, or of rounds where each rank makes its own."""
        return self.steps or (self.epochs or 0) * self.batches.updates


@dataclass(frozen=True)
class Hooks:
    """The observers of a run; each is called on every rank.

    Attributes:
        progress: shows the run.
        on_epoch: called with the record of each epoch, when its validation is known.
        on_step: called before each of the rank's steps, with the number of updates made before.
        checkpoint: called when the final weights are in place, to write them; before the last record.
        trace: where each stage is noted; None: nowhere.
    """

    progress: Progress = field(default_factory=Progress)
    on_epoch: Callable[[EpochRecord], None] | None = None
    on_step: Callable[[int], None] | None = None
    checkpoint: Callable[[], None] | None = None
    trace: Trace | None = None


class Trainer:
    """Trains a replica, on every rank of a communicator at once.

    Args:
        workers: the ranks, and how this one computes and steps.
        objective: loss and metrics, and how the model computes; the module was prepared by that.
        schedule: the batches, and how many updates are made with them.
        validation: what is evaluated after every epoch; None: nothing.
        hooks: see the run.
    """

    def __init__(
        self,
        workers: Workers,
        objective: Objective,
        schedule: Schedule,
        validation: ValidationPlan | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.comm, self.replica, self.worker = workers.comm, workers.replica, workers.worker
        self._optimizer, self._everyone = workers.optimizer, workers.everyone or workers.comm
        self._compute_batch = workers.compute or self._forward_backward
        self._collective, self._seconds_per_sample = workers.collective, workers.seconds_per_sample
        self._objective, self._loss, self._arithmetic = objective, objective.loss, objective.arithmetic
        self._batches, self._schedule, self._balance = schedule.batches, schedule.lr, schedule.balance
        self._updates = schedule.updates
        self._validation_plan, self._hooks = validation, hooks or Hooks()
        self._progress = self._hooks.progress
        self._now = perf_counter if self._seconds_per_sample is None else self.comm.clock
        self._stages, self._look_s = StageTimer(self._now), look_s(self._now)
        self.worker.updating.clock = self._now
        self._step, self._steps, self._scheduled, self._lr = 0, 0, 0, math.nan
        self._shares: dict[float, Tensor] = {}
        self._finite_check = FiniteCheck()
        self._unvalidated: deque[EpochRecord] = deque()
        self._validation: Validation | None = None

    def fit(self) -> list[EpochRecord]:
        """Train to the end (collective).

        The module is in training mode meanwhile and afterwards. When this returns, its weights and buffers
        are final, and equal on all ranks.

        Returns:
            One record for each epoch; equal on all ranks but for the times.

        Raises:
            BadModel, BadData, BadOption: model, data, loss and metrics do not fit; before the first step.
            NotFinite: the loss or a weight became NaN or inf.
        """
        module = self.replica.module
        self._stages.trace = self.worker.updating.trace = self._hooks.trace
        history: list[EpochRecord] = []
        self._objective = check_fit(module, self._batches.part, self._objective)
        self._loss = self._objective.loss
        if not module.training:
            module.train()
        check_smallest_batch(module, self._batches, arithmetic=self._arithmetic)
        plan = self._validation_plan
        if plan is not None:
            task = ValidationTask(self.replica, plan.part, self.comm, self._objective)
            self._validation = VALIDATIONS.named(plan.how)(task)
        self._progress.begin(RunLength(self._updates, self._batches.updates))
        try:
            while self._step < self._updates:
                for record in self._epoch(len(history) + len(self._unvalidated)):
                    history.append(record)
                    self._progress.epoch(record)
                    if self._hooks.on_epoch is not None:
                        self._hooks.on_epoch(record)
        finally:
            self._progress.end()
            if self._validation is not None:
                self._validation.close()
        return history

    def _epoch(self, epoch: int) -> list[EpochRecord]:
        """Train an epoch; returns the records that are complete now, of this epoch and earlier ones."""
        began, tally = self._stages.start(), Tally(replace(self._objective, classes=None))
        last = min(self._updates, self._step + self._batches.updates)
        final = last == self._updates
        self._train(epoch, last, tally)
        self._meet(final)
        train = tally.total(self.comm)
        trained = self._stages.lap("wait" if self._everyone.size > 1 else "reduce")
        # Records are exchanged while the ranks are together, so that none waits for that alone.
        stays = final or self._validation is None or self._validation.meets
        ranks = [] if stays else self._ranks(tally.samples)
        evaluations = self._validate(final)
        ended = self._stages.lap("validation")
        if final and self._hooks.checkpoint is not None:
            self._hooks.checkpoint()
            self._stages.lap("checkpoint")
        if stays:
            ranks = self._ranks(tally.samples)
        record = EpochRecord(
            epoch=epoch + 1,
            step=self._step,
            complete=self._step == (epoch + 1) * self._batches.updates,
            train=train,
            validation=None,
            seconds={"validation": ended - trained, "total": ended - began},
            samples_per_s=_rate(train.samples, trained - began),
            lr=float(self._lr),
            time=now(),
            ranks=ranks,
        )
        if self._hooks.trace is not None:
            self._hooks.trace.add(f"epoch {epoch + 1}", began, self._stages.last)
        self._unvalidated.append(record)
        return [replace(self._unvalidated.popleft(), validation=found) for found in evaluations]

    def _meet(self, final: bool) -> None:
        """Bring the workers together (collective): the replica gets the weights that are to be evaluated."""
        self._stages.divide(self.worker.traffic, self.worker.updating)
        self._progress.doing(WAITING)
        # Before anything collective: others may still wait for what this worker will exchange.
        if final:
            self.worker.finish()
        else:
            self.worker.settle()
        self._refuse_broken_weights()
        average_buffers(self.replica, self.comm)

    def _train(self, epoch: int, last: int, tally: Tally) -> None:
        """Make the updates of one epoch, up to update number `last` of the run."""
        stages, on_step, first = self._stages, self._hooks.on_step, self._step
        start = epoch * self._batches.updates
        began = stages.start()
        report = began + self._progress.every_s
        for made, passes in self._batches.epoch(epoch, first - start, last - start):
            stages.lap("data")
            if on_step is not None:
                on_step(made)
                stages.start()
            loaded = self._schedule_until(made)
            late = self.worker.is_late()
            samples, weight = (0, 0.0) if late else self._compute(passes, epoch, tally)
            computed = stages.last
            self._lr = self._optimizer.param_groups[0]["lr"]
            if not late and (samples or not self._batches.own):
                self._divide(made, passes, samples, weight)
                self.worker.step()
                self._steps += 1
            else:
                self.worker.skip()
            if self._balance is not None:
                self._balance.note(samples, computed - loaded)
            self._step = made + 1
            now = stages.lap(EXCHANGE)
            if now >= report:
                rate = _rate(self._batches.samples(self._step - first), now - began)
                self._progress.moment(Moment(epoch + 1, self._step, tally.here(), rate))
                report = stages.start() + self._progress.every_s
        self._step = last
        self._schedule_until(last)
        if isinstance(tally.loss, Tensor):
            if last < self._updates:
                self._batches.prepare(epoch + 1)
            self._refuse_sum(epoch, self._finite_check.last(tally.loss, last))
            stages.lap("backward")

    def _schedule_until(self, updates: int) -> float:
        """Step the schedule until it stands where it belongs after so many updates; returns the time."""
        while self._schedule is not None and self._scheduled < updates:
            self._schedule.step()
            self._scheduled += 1
        return self._stages.lap("update")

    def _compute(self, passes: Sequence[Batch], epoch: int, tally: Tally) -> tuple[int, float]:
        """Forward and backward of this rank's part of an update; returns its samples, and their weight."""
        before, weight = tally.samples, 0.0
        for batch in passes:
            if batch.share or self._collective:
                weight += self._pass(batch, epoch, tally)
        if isinstance(tally.loss, Tensor):
            self._refuse_sum(epoch, self._finite_check.note(tally.loss, self._step + 1))
            self._stages.lap("backward")
        self._charge(tally.samples - before)
        return tally.samples - before, weight

    def _divide(self, made: int, passes: Sequence[Batch], samples: int, weight: float) -> None:
        """Tell the worker what its gradient stands for, which is divided by the loss's own denominator."""
        worker, own = self.worker, self._batches.own
        if not own:
            worker.share = sum(batch.share for batch in passes)
        if not self._loss.weighed:
            return
        if own:
            divide_by_weight(self.replica, None, weight, samples)
        elif worker.divides:
            worker.weight = weight / self._batches.samples_of(made)
        else:
            whole = divide_by_weight(self.replica, self.comm, weight, self._batches.samples_of(made))
            worker.share = weight / whole if whole else 0.0

    def _pass(self, batch: Batch, epoch: int, tally: Tally) -> float:
        """Add this batch's gradient, and count its samples; returns the denominator of its losses."""
        computed = self._compute_batch(batch)
        weight = len(computed.targets) if computed.weight is None else computed.weight
        tally.add(computed.loss, computed.outputs, computed.targets, weight)
        self._stages.lap("backward", computed.seconds)
        if isinstance(computed.loss, float) and not math.isfinite(computed.loss):
            self._refuse_loss(epoch, computed.loss, f"step {self._step + 1}")
        return weight

    def _forward_backward(self, batch: Batch) -> Computed:
        """Add this batch's gradient, weighted by its share of the update."""
        inputs, targets = self._arithmetic.inputs(batch.inputs), self._arithmetic.targets(batch.targets)
        self._stages.lap("copy")
        outputs = self._arithmetic.forward(self.replica.module, inputs)
        loss, weight = self._loss.measure(outputs, targets)
        self._stages.lap("forward")
        # Backward that begins with the share gives the gradient of loss * share, a multiplication less.
        share = self._shares.get(batch.share)
        if share is None:
            share = self._shares[batch.share] = loss.new_tensor(batch.share)
        torch.autograd.backward(loss, share)
        return Computed(self._arithmetic.number(loss), outputs.detach(), targets, weight)

    def _charge(self, samples: int) -> None:
        """Let the virtual clock, if it measures the times, go on by what so many samples cost.

        Not before all is computed: meanwhile others may move the weights, if they are shared.
        """
        if self._seconds_per_sample is not None:
            for stage, share in (("forward", FORWARD), ("backward", 1 - FORWARD)):
                self.comm.compute(self._seconds_per_sample * samples * share)
                self._stages.lap(stage)

    def _validate(self, final: bool) -> Sequence[Evaluation | None]:
        """Have the weights evaluated; the results that are known now, of this epoch and earlier ones."""
        if self._validation is not None:
            self._progress.doing(VALIDATING)
            self._validation.begin()
        if not final:
            self.worker.resume()
        return [None] if self._validation is None else self._validation.collect(everything=final)

    def _ranks(self, samples: int) -> list[RankRecord]:
        """What each rank did since it was last asked (collective)."""
        stages, measuring_s = self._stages.take(self._look_s)
        exchanged = self.worker.traffic.take().figures()
        mine = RankRecord(self._steps, samples, stages, measuring_s, **exchanged)
        self._steps = 0
        return cast("list[RankRecord]", self._everyone.all_gather_objects(mine))

    def _refuse_sum(self, epoch: int, seen: RunningSum | None) -> None:
        """Refuse what a GPU has summed up, as soon as that is known."""
        if seen is not None and not math.isfinite(seen.total):
            steps = f"steps {seen.first} to {seen.last}" if seen.first < seen.last else f"step {seen.last}"
            self._refuse_loss(epoch, seen.total, steps)

    def _refuse_loss(self, epoch: int, loss: float, step: str) -> None:
        name = self.replica.first_not_finite()
        where = f"the first parameter that is not finite, in gradient or weight, is '{name}'"
        raise NotFinite(
            f"the loss became {loss} in {step} (epoch {epoch + 1}) on rank {self.comm.rank}; "
            f"{where if name else 'all weights and gradients are finite'}. {_REMEDY}"
        )

    def _refuse_broken_weights(self) -> None:
        """The last update may break weights without any loss having shown it."""
        name = self.replica.first_not_finite()
        if name is None:
            return
        raise NotFinite(
            f"parameter '{name}' is no longer finite after step {self._step} on rank {self.comm.rank}, "
            f"though the loss was. {_REMEDY}"
        )


_REMEDY = (
    "Lower the learning rate (--lr), clip the gradient (--clip-norm 1), or look for such values in the data."
)


def _rate(samples: int, seconds: float) -> float:
    """Samples per second; 0 where no time has passed, as on a virtual clock that nothing moves."""
    return samples / seconds if seconds > 0 else 0.0


def divide_by_weight(replica: Replica, comm: Communicator | None, weight: float, samples: int) -> float:
    """Make an update's gradient the mean by the loss's own denominator (collective over `comm`).

    Where a loss is no plain mean over samples, each pass adds the gradient of its sum of losses / the samples
    of the update: what the denominators of all ranks and passes are is known after the last one.

    Args:
        replica: its gradients are scaled. They become zero where nothing has a weight.
        comm: the ranks that make the update together; None: each makes its own.
        weight: of this rank's samples.
        samples: behind the update.

    Returns:
        The weight of the update.
    """
    total = torch.tensor([weight], dtype=torch.float64)
    if comm is not None:
        comm.all_reduce(total)
    whole = float(total.item())
    replica.scale_gradients(samples / whole if whole else 0.0)
    return whole
