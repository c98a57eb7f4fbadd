"""The parts of a trainer: workers, the updates that they make, and observers."""

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
from tutti.training.batch_norm import BatchStatistics
from tutti.training.callbacks import Callbacks
from tutti.training.progress import Progress


@dataclass(frozen=True)
class Computed:
    """The results of forward and backward of a batch, except the gradients."""

    loss: float | Tensor  # the sum of the losses / the samples; 0 without samples. On a GPU a scalar there
    outputs: Tensor  # of the model, of shape (samples, ...), without gradient
    targets: Tensor  # of shape (samples, ...), on the device of the outputs
    weight: float | None = None  # the denominator of the losses; None: the samples
    seconds: Mapping[str, float] = field(default_factory=dict)  # of stages other than backward


Compute = Callable[[Batch], Computed]
"""Computes the gradient of a batch and adds it, times the batch's share of the update, to the gradients."""


@dataclass(frozen=True)
class Workers:
    """The workers of a run, as one of them sees them.

    With `seconds_per_sample`, the cost of forward and backward, a virtual clock measures all times. It may be
    a function from the samples of an update to their seconds.
    """

    comm: Communicator  # over which samples are dealt: the whole job, unless several ranks hold one model
    replica: Replica
    worker: Worker  # this rank's part in the strategy
    optimizer: Optimizer  # the one that `worker` was made with; its learning rate is recorded
    compute: Compute | None = None  # forward and backward of a batch; None: the module and the loss
    collective: bool = False  # several ranks compute together, so also a batch without samples
    everyone: Communicator | None = None  # all ranks of the job, for the records; None: those of `comm`
    group: Communicator | None = None  # the ranks of this worker, if several are one
    seconds_per_sample: float | Callable[[int], float] | None = None
    statistics: BatchStatistics | None = None  # of BatchNorm over the whole batch; None: each rank's own
    meets: bool = True  # the workers meet at each step's exchange, so that one may be late

    def sharing(self, batches: Batches) -> Communicator | None:
        """Return the ranks that share each update with this one; None: it makes its own."""
        return self.group or (None if batches.own else self.comm)


@dataclass(frozen=True)
class Schedule:
    """The updates of a run: give either `epochs` or `steps`, which may end in the middle of an epoch.

    Where each rank makes its own updates, `steps` are each rank's. `scheduler` is stepped for each update, or
    each round of the ranks' own updates; ReduceLROnPlateau for each epoch.
    """

    batches: Batches  # of this rank
    epochs: int | None = None
    steps: int | None = None
    scheduler: LRScheduler | None = None
    balance: SpeedBalance | None = None  # splits each update over the ranks by their speeds
    stepped: int = 0  # the steps that `scheduler` has made
    skip_nonfinite: int = 0  # the most updates in a row to skip because a gradient is not finite

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
    """The observers of a run; each is called on every rank."""

    progress: Progress = field(default_factory=Progress)
    on_epoch: Callable[[EpochRecord], None] | None = None  # gets each epoch when its validation is known
    on_step: Callable[[int], None] | None = None  # before each step, with the number of updates made before
    checkpoint: Callable[[], None] | None = None  # writes the final weights; before the last record
    save: Callable[[int, State, Decision], None] | None = None  # keeps the state of a run (collective)
    trace: Trace | None = None  # gets the time of each stage
    callbacks: Callbacks | None = None
