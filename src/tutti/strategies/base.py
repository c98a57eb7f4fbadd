"""The contract of a strategy: what a worker does with its gradients after `backward()`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from torch.optim import Optimizer

from tutti.comm.base import Communicator, Group
from tutti.errors import BadOption
from tutti.parameter_server.base import Centre
from tutti.parameter_server.connect import check_reachable
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies.measurements import Stopwatch, Traffic


class WeightPlacement(Enum):
    """The place of the workers' weights."""

    SHARED = "one copy per host, seen by all its workers"
    PRIVATE = "each worker has its own"


class Pace(Enum):
    """The relation of the workers' steps to each other."""

    TOGETHER = "all workers make one update from one batch, which is split over them"
    ABREAST = "each worker has its own batches; all make their k-th step at the same time"
    FREE = "each worker has its own batches and never waits"


@dataclass(frozen=True)
class Clip:
    """Gradient clipping, applied to the gradient of the whole update (after the reduction).

    Attributes:
        norm: the largest 2-norm of the gradient of the whole model; above it the gradient is scaled down.
            None: off.
        value: the largest absolute value of an element; applied before `norm`. None: off.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            limit = getattr(self, name)
            number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (number and 0 < limit < math.inf):
                raise BadOption(f"clip_{name} is {limit!r}; give a finite number above 0, or None")


class Worker(ABC):
    """One rank's part in a strategy. Made by `Strategy.worker`; called by the training loop.

    Attributes:
        traffic: counts of its exchanges; the loop takes them once an epoch.
        updating: runs while the weights are moved: `with self.updating: optimizer.step()`.
        share: this rank's share of the update's samples, 0 to 1, by which its gradient has been weighted. The
            loop sets it before each step under the pace TOGETHER; it is 1 under the others. Where the loss
            has its own denominator, it is the share of that.
        waits: whether a step under the pace TOGETHER waits for the gradients of all workers.
        restarts: the parts, in words, that start over when a different number of ranks resumes.
    """

    def __init__(self) -> None:
        self.share, self.waits = 1.0, True
        self.restarts: tuple[str, ...] = ()
        self.traffic = Traffic()
        self.updating = Stopwatch()

    @abstractmethod
    def step(self) -> None:
        """Move the weights, given this rank's gradient in `replica.flats[...].grads`.

        Called after the `backward()` of the update's last pass. The gradients are zero when it returns.
        """

    def skip(self) -> None:
        """Take part in a round without a gradient, in place of `step`.

        Called when the worker has no samples and the pace is not TOGETHER, when it is `late`, or when a
        gradient is not finite: this rank's, or under the pace TOGETHER any rank's. Drop the gradient, and
        take part in the exchange if the pace is ABREAST. The gradients are zero when it returns.
        """
        return

    @property
    def late(self) -> bool:
        """True if the others have already made this update, so that a gradient for it would be useless.

        Read before a round's forward pass. A loop that cannot leave out a round may `step` anyway.
        """
        return False

    def settle(self) -> None:
        """Put the weights to be evaluated into every replica, after an epoch or before an evaluation.

        Collective, and called before any other collective: until then others may still wait for this worker.
        Where each worker has its own weights, these are kept until `resume`, and the centre's weights or the
        workers' average take their place.
        """
        return

    def resume(self) -> None:
        """Continue training after `settle`, from the weights that it put aside (collective)."""
        return

    @abstractmethod
    def state(self) -> State:
        """Return what this worker needs to continue, besides what the replica holds after `settle`.

        Called by all workers between `settle` and `resume`. A worker made later, of a replica with those
        weights and an optimizer with the state in `joint` or `alone`, continues exactly as this one does
        after `load_state`.
        """

    @abstractmethod
    def load_state(self, saved: Saved) -> None:
        """Continue from the state of an earlier worker (collective); called once, before the first step.

        Where `saved.own` is None, what it would hold starts over.
        """

    @abstractmethod
    def finish(self) -> None:
        """Put the final weights into every replica, after the last step."""


@dataclass(frozen=True)
class Strategy(ABC):
    """A way to train in parallel. Its fields are its hyper-parameters: options and config come from them.

    Under the pace TOGETHER a rank's gradient is its samples' share of the update's gradient: the loop
    multiplies each loss by (samples of this pass) / (samples of the update), so that the plain sum over the
    ranks and passes is the mean over the samples. A loss with its own denominator is divided by that instead.
    Under the other paces a rank's gradient is the mean over its own batch.

    Attributes:
        home: the place of the workers' weights.
        pace: the relation of their steps to each other.
        needs: requirements besides the workers, such as a parameter centre.
        joint_norm: whether clipping by norm works when several ranks hold one model together: by
            `clip_gradients`, or by `Gradients.share`.
        most_workers: the largest world size that it can use; None: any.
        most_hosts: the largest number of hosts; None: any.
        most_levels: the most levels of parameter centres: with 2, each host has a centre below the servers.
    """

    name: ClassVar[str]
    home: ClassVar[WeightPlacement]
    pace: ClassVar[Pace] = Pace.TOGETHER
    needs: ClassVar[tuple[type, ...]] = ()
    joint_norm: ClassVar[bool] = False
    most_workers: ClassVar[int | None] = None
    most_hosts: ClassVar[int | None] = None
    most_levels: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Raise BadOption for a value that its field does not allow."""
        for field in fields(self):
            if "allows" in field.metadata and not field.metadata["allows"](getattr(self, field.name)):
                raise BadOption(f"{self.as_given(field.name)}; expected {field.metadata['expected']}")

    def as_given(self, field: str) -> str:
        """Return a hyper-parameter and its value as an error message names them."""
        return f"option '{field}' of strategy '{self.name}' is {getattr(self, field)!r}"

    @property
    def passes(self) -> int:
        """The number of forward and backward passes of each worker for one update."""
        return 1

    @property
    def least_workers(self) -> int:
        """The smallest number of workers that it can use."""
        return 1

    @property
    def period(self) -> int:
        """The number of steps within which a worker exchanges something with the others."""
        return 1

    @abstractmethod
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        """Make this rank's worker (collective).

        Args:
            replica: the model; its weights live where `home` says.
            comm: all ranks of the job.
            optimizer: the user's optimizer over the replica's parameters. Its param groups are read at every
                step, so learning-rate schedulers attached to it work.
            clip: gradient clipping.
        """

    def groups(self, comm: Communicator) -> Group | None:
        """Make the groups of ranks that are one worker each (collective); None: each rank is a worker.

        Raises:
            BadOption: the hosts' ranks cannot be grouped like that.
        """
        return None

    def check(self, workers: int, hosts: int = 1, servers: int = 0, levels: int = 1) -> None:
        """Refuse a world that the strategy cannot use.

        Args:
            workers: the number of ranks that train.
            hosts: the number of hosts.
            servers: the number of further ranks for a parameter centre.
            levels: the number of levels of centres.

        Raises:
            BadOption: there are too few or too many workers, too many hosts or levels, servers for a strategy
                without a centre, or none for one with a centre on several hosts.
        """
        for most, count, kind, remedy in (
            (self.most_hosts, hosts, "host", "leave --hosts out, or use"),
            (self.most_workers, workers, "worker", f"use '-n {self.most_workers}' or"),
        ):
            if most is not None and count > most:
                raise BadOption(
                    f"strategy '{self.name}' runs on {most} {kind}, not {count}; {remedy} '--strategy sync'"
                )
        if workers < self.least_workers:
            raise BadOption(
                f"strategy '{self.name}' needs {self.least_workers} workers, not {workers}; use "
                f"'-n {self.least_workers}' or more, or '--strategy solo'"
            )
        if levels > self.most_levels:
            raise BadOption(
                f"--levels is {levels}, but the parameter centre of strategy '{self.name}' has one level; "
                "use '--levels 1', or one with more, such as '--strategy downpour'"
            )
        if Centre in self.needs:
            check_reachable(hosts, servers)
        elif servers:
            raise BadOption(
                f"--servers is {servers}, but strategy '{self.name}' has no parameter centre that servers "
                "could keep; leave --servers out, or use one that has it, such as '--strategy downpour'"
            )

    def options(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
