"""The parts that a trainer is made of: workers, the updates that they make, and those who look on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.comm.base import Communicator
from tutti.data.batches import Batch, Batches
from tutti.records.run import EpochRecord
from tutti.records.trace import Trace
from tutti.replica import Replica
from tutti.state import State, Values
from tutti.strategies.base import Worker
from tutti.training.agenda import Decision
from tutti.training.balance import SpeedBalance
from tutti.training.callbacks import Callbacks
from tutti.training.progress import Progress


@dataclass(frozen=True)
class Computed:
    """Results of forward and backward of a batch, the gradients aside.

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
"""Computes the gradient of a batch and adds it, times the batch's share of the update, to the gradients."""


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
        meets: each whole model's workers come to the exchange of a step together, so that one may be late.
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
    meets: bool = True


@dataclass(frozen=True)
class Schedule:
    """The updates of a run.

    Attributes:
        batches: this rank's training batches; `comm.size` ranks, the strategy's passes, and `own` unless the
            strategy's workers make one update together. Or a queue that deals such own batches.
        epochs: passes over the training samples; or
        steps: weight updates (of each rank, where each makes its own), the last epoch ending in the middle if
            need be. Give one of the two.
        lr: a learning-rate scheduler of torch. It is stepped once for each update, or each round of the
            ranks' own updates; ReduceLROnPlateau once for each epoch.
        balance: splits each update over the ranks by their speeds.
        stepped: how often `lr` was stepped before.
        skip_nonfinite: so many updates in a row may be skipped because a gradient is not finite; 0: none is
            looked at.
    """

    batches: Batches
    epochs: int | None = None
    steps: int | None = None
    lr: LRScheduler | None = None
    balance: SpeedBalance | None = None
    stepped: int = 0
    skip_nonfinite: int = 0

    @property
    def updates(self) -> int:
        """The number of weight updates that the run makes, or of rounds where each rank makes its own."""
        return self.steps or (self.epochs or 0) * self.batches.updates

    def has_length_of(self, training: Values) -> bool:
        """Return whether the run that saved `training` had as many updates, in total and in each epoch."""
        per_epoch = training.get("per_epoch", self.batches.updates)
        return (training["updates"], per_epoch) == (self.updates, self.batches.updates)


@dataclass(frozen=True)
class Hooks:
    """The observers of a run; each is called on every rank.

    Attributes:
        progress: shows the run.
        on_epoch: called with the record of each epoch, when its validation is known.
        on_step: called before each of the rank's steps, with the number of updates made before.
        checkpoint: called when the final weights are in place, to write them; before the last record.
        save: keeps the state of a run (collective): the updates made, this rank's state, and the decision.
        trace: where each stage is noted; None: nowhere.
        callbacks: the user's.
    """

    progress: Progress = field(default_factory=Progress)
    on_epoch: Callable[[EpochRecord], None] | None = None
    on_step: Callable[[int], None] | None = None
    checkpoint: Callable[[], None] | None = None
    save: Callable[[int, State, Decision], None] | None = None
    trace: Trace | None = None
    callbacks: Callbacks | None = None
