"""The training loop: forward, backward, the strategy's step, and what is to be known about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.comm.base import Communicator
from tutti.data.batches import Batch, Batches, Update
from tutti.data.parts import Part
from tutti.errors import BadOption, NotFinite
from tutti.records import EpochRecord, Evaluation, now
from tutti.replica import Replica
from tutti.strategies.base import Worker
from tutti.training.arithmetic import FP32, Arithmetic
from tutti.training.evaluate import average_buffers, evaluate
from tutti.training.fitting import check_fit, check_smallest_batch
from tutti.training.losses import Loss
from tutti.training.metrics import Metric
from tutti.training.progress import Moment, Progress, Silent, Span
from tutti.training.tally import Tally


@dataclass
class _Stages:
    """Where the seconds of an epoch went."""

    data: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0


@dataclass(kw_only=True)
class Trainer:
    """Trains a replica, on every rank of a communicator at once.

    Attributes:
        comm: all ranks of the job.
        replica: the model.
        worker: this rank's part in the strategy.
        optimizer: the user's optimizer that `worker` was made with; its learning rate is recorded.
        batches: this rank's training batches; `comm.size` ranks and the strategy's passes.
        loss: the mean over a batch.
        epochs: passes over the training samples; or
        steps: weight updates, the last epoch ending in the middle if need be. Give one of the two.
        metrics: computed besides the loss, on training and validation samples.
        validation: evaluated after every epoch.
        classes: how many classes the validation's confusion matrix tells apart; None: no matrix.
        schedule: a learning-rate scheduler of torch, stepped after each update.
        arithmetic: how the model computes; the module was prepared by it.
        progress: shows the run.
        on_epoch: called on every rank with the record of each epoch.
    """

    comm: Communicator
    replica: Replica
    worker: Worker
    optimizer: Optimizer
    batches: Batches
    loss: Loss
    epochs: int | None = None
    steps: int | None = None
    metrics: Sequence[Metric] = ()
    validation: Part | None = None
    classes: int | None = None
    schedule: LRScheduler | None = None
    arithmetic: Arithmetic = FP32
    progress: Progress = field(default_factory=Silent)
    on_epoch: Callable[[EpochRecord], None] | None = None

    def __post_init__(self) -> None:
        self.updates = run_length(self.batches, self.epochs, self.steps)
        self._step, self._lr = 0, math.nan
        self._shares: dict[float, Tensor] = {}

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
        history: list[EpochRecord] = []
        fit = self.batches.part, self.loss, self.metrics, self.classes
        check_fit(module, *fit, arithmetic=self.arithmetic)
        if not module.training:
            module.train()
        check_smallest_batch(module, self.batches, self.comm.size, arithmetic=self.arithmetic)
        self.progress.begin(Span(self.updates, self.batches.updates))
        try:
            while self._step < self.updates:
                record = self._epoch(len(history))
                history.append(record)
                self.progress.epoch(record)
                if self.on_epoch is not None:
                    self.on_epoch(record)
        finally:
            self.progress.end()
        return history

    def _epoch(self, epoch: int) -> EpochRecord:
        began, tally, stages = perf_counter(), Tally(self.metrics), _Stages()
        last = min(self.updates, self._step + self.batches.updates)
        self._train(epoch, last, tally, stages)
        if self._step == self.updates:
            self.worker.finish()
        self._refuse_broken_weights()
        average_buffers(self.replica, self.comm)
        train = tally.total(self.comm)
        trained = perf_counter()
        validation = self._validate()
        ended = perf_counter()
        seconds = {**vars(stages), "validation": ended - trained, "total": ended - began}
        return EpochRecord(
            epoch=epoch + 1,
            step=self._step,
            complete=self._step == (epoch + 1) * self.batches.updates,
            train=train,
            validation=validation,
            seconds=seconds,
            samples_per_s=train.samples / (trained - began),
            lr=float(self._lr),
            time=now(),
        )

    def _train(self, epoch: int, last: int, tally: Tally, stages: _Stages) -> None:
        """Make the updates of one epoch, up to update number `last` of the run."""
        step, schedule, samples = self.worker.step, self.schedule, 0
        began = before = perf_counter()
        report = began + self.progress.every_s
        for update in self._updates(epoch, last):
            loaded = perf_counter()
            loss = sum([self._forward_backward(batch, tally) for batch in update.passes if batch.share])
            if not math.isfinite(loss):
                self._refuse_loss(epoch, loss)
            computed = perf_counter()
            self._lr = self.optimizer.param_groups[0]["lr"]
            step()
            if schedule is not None:
                schedule.step()
            self._step += 1
            samples += update.samples
            stages.data += loaded - before
            stages.compute += computed - loaded
            before = perf_counter()
            stages.exchange += before - computed
            if before >= report:
                rate = samples / (before - began)
                self.progress.moment(Moment(epoch + 1, self._step, tally.here(), rate))
                report = before + self.progress.every_s

    def _updates(self, epoch: int, last: int) -> Iterator[Update]:
        """The updates of an epoch until the run has made `last`; a further batch is not gathered in vain."""
        updates = self.batches.epoch(epoch)
        for _ in range(last - self._step):
            yield next(updates)

    def _forward_backward(self, batch: Batch, tally: Tally) -> float:
        """Add this batch's gradient, weighted by its share of the update; returns its loss."""
        inputs, targets = self.arithmetic.inputs(batch.inputs), self.arithmetic.targets(batch.targets)
        outputs = self.arithmetic.forward(self.replica.module, inputs)
        loss = self.loss(outputs, targets)
        # Backward that begins with the share gives the gradient of loss * share, a multiplication less.
        share = self._shares.get(batch.share)
        if share is None:
            share = self._shares[batch.share] = loss.new_tensor(batch.share)
        torch.autograd.backward(loss, share)
        value = loss.item()
        tally.add(value, outputs.detach(), targets)
        return value

    def _validate(self) -> Evaluation | None:
        if self.validation is None:
            return None
        module, rest = self.replica.module, (self.loss, self.metrics, self.classes)
        return evaluate(module, self.validation, self.comm, *rest, arithmetic=self.arithmetic)

    def _refuse_loss(self, epoch: int, loss: float) -> None:
        name = self.replica.first_not_finite()
        where = f"the first parameter that is not finite, in gradient or weight, is '{name}'"
        raise NotFinite(
            f"the loss became {loss} in step {self._step + 1} (epoch {epoch + 1}) on rank {self.comm.rank}; "
            f"{where if name else 'all weights and gradients are finite'}. {_REMEDY}"
        )

    def _refuse_broken_weights(self) -> None:
        """The last update may break weights without any loss having shown it."""
        if all(bool(flat.weights.isfinite().all()) for flat in self.replica.flats):
            return
        name = self.replica.first_not_finite()
        raise NotFinite(
            f"parameter '{name}' is no longer finite after step {self._step} on rank {self.comm.rank}, "
            f"though the loss was. {_REMEDY}"
        )


_REMEDY = (
    "Lower the learning rate (--lr), clip the gradient (--clip-norm 1), or look for such values in the data."
)


def run_length(batches: Batches, epochs: int | None = None, steps: int | None = None) -> int:
    """How many weight updates a run makes.

    Raises:
        BadOption: not exactly one of `epochs` and `steps` is given, or it is below 1.
    """
    given = [count for count in (epochs, steps) if count is not None]
    if len(given) != 1 or given[0] < 1:
        raise BadOption(
            f"epochs is {epochs} and steps is {steps}; give one of them, as a whole number from 1"
        )
    return steps if steps is not None else given[0] * batches.updates
