"""The results of a run, as dataclasses and as JSON. Needs neither torch nor MPI.

A run's history is a file of JSON lines, one `EpochRecord` each.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from typing import Final

from tutti.records.json_lines import Record

STAGES: Final = (
    "extract",
    "data",
    "copy",
    "forward",
    "backward",
    "wait",
    "reduce",
    "update",
    "validation",
    "checkpoint",
)
"""The stages that a rank's time is divided into; wait, reduce and update are the parts of an exchange.

extract: waiting for samples that are streamed from files. data: getting a batch of what memory holds. copy:
to the device, and into the precision and layout of the model. forward: with the loss. backward: with the
metrics. wait: for other ranks, in exchanges and at the end of an epoch. reduce: the rest of an exchange:
sums, messages, copies. update: moving the weights. validation: what it held training up. checkpoint: copying
the state of the run for checkpoints, and writing the final weights.
"""


@dataclass(frozen=True)
class Evaluation(Record):
    """The quality of a model on a number of samples, each counted once.

    Attributes:
        samples: their number, over all ranks.
        loss: their mean loss, by their weights if they have some.
        metrics: the mean of each metric over them, by name, likewise.
        confusion: the samples of each class (row) by predicted class (column), or the sum of their weights;
            None without classes. A further column counts predictions of no known class.
        weighted: the samples have weights.
    """

    samples: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    confusion: list[list[float]] | None = field(default=None, repr=False)
    weighted: bool = False

    def class_accuracy(self) -> list[float | None]:
        """Return the share of each class that was recognised, in [0, 1].

        None for a class without samples; empty without a confusion matrix.
        """
        return [row[k] / sum(row) if sum(row) else None for k, row in enumerate(self.confusion or [])]

    def class_precision(self) -> list[float | None]:
        """Return the share of correct predictions of each class; None for one never predicted."""
        rows = self.confusion or []
        found = [sum(row[k] for row in rows) for k in range(len(rows))]
        return [row[k] / found[k] if found[k] else None for k, row in enumerate(rows)]

    def class_f1(self) -> list[float | None]:
        """Return the F1 score of each class; None for one that neither occurs nor is predicted."""
        rows = self.confusion or []
        both = [sum(row) + sum(other[k] for other in rows) for k, row in enumerate(rows)]
        return [2 * row[k] / both[k] if both[k] else None for k, row in enumerate(rows)]


@dataclass(frozen=True)
class RankRecord(Record):
    """The work of one rank in an epoch.

    Attributes:
        updates: its steps.
        samples: training samples that it computed.
        stages: its seconds by stage, one of `STAGES`. Where validation is distributed, those since the
            previous record: the time of a validation is in the next record, of the last one in the last.
        exchanges: the number of exchanges with other ranks.
        bytes_sent: sent, or written for others to read.
        dropped: its gradients that came too late and were not used.
        skipped: exchanges that its strategy left out.
        left_out: its gradients that were not finite and were not used.
        staleness: {updates: times}: updates by others between computing a gradient and applying it. From 64
            on a power of two includes all numbers up to the next one.
        age_s_mean: the mean age, in seconds, of the weights that an applied gradient was computed from.
        age_s_p99: their 99th percentile.
        age_s_max: their maximum.
        compared: steps whose last rank at the exchange is known.
        last: those in which it was this rank.
        own_s: the median of its seconds from one exchange to the next, the exchanges aside.
    """

    updates: int = 0
    samples: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    exchanges: int = 0
    bytes_sent: int = 0
    dropped: int = 0
    skipped: int = 0
    left_out: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    age_s_mean: float | None = None
    age_s_p99: float | None = None
    age_s_max: float | None = None
    compared: int = 0
    last: int = 0
    own_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for other ranks."""
        return self.stages.get("wait", 0.0)

    @property
    def staleness_mean(self) -> float | None:
        """The mean of `staleness`; None if nothing was counted."""
        if not self.staleness:
            return None
        total = sum(updates * count for updates, count in self.staleness.items())
        return total / sum(self.staleness.values())

    @property
    def staleness_p99(self) -> int | None:
        """The 99th percentile of `staleness`."""
        left = int(0.99 * sum(self.staleness.values()))
        for updates, count in sorted(self.staleness.items()):
            left -= count
            if left < 0:
                return updates
        return None

    @property
    def staleness_max(self) -> int | None:
        """The largest of `staleness`."""
        return max(self.staleness, default=None)


@dataclass(frozen=True)
class EpochRecord(Record):
    """One epoch of training, or the part of it that a run of a given number of steps reached.

    Attributes:
        epoch: its number, from 1.
        step: weight updates made since the run began; where each rank makes its own, one rank's (the mean,
            where ranks ask for their batches).
        complete: whether the epoch was trained to its end.
        train: loss and metrics of its training samples, each at the time of its update.
        validation: on the validation part after the epoch; None without such a part.
        seconds: of rank 0: "validation", the delay by validation, and "total", both without the writing of
            checkpoints. `ranks` has the stages.
        samples_per_s: training samples of all ranks per second, validation not counted.
        lr: the learning rate of the first parameter group in rank 0's last update.
        time: the end of the epoch (UTC, ISO 8601).
        ranks: the work of each rank, in rank order.
    """

    epoch: int
    step: int
    complete: bool
    train: Evaluation
    validation: Evaluation | None
    seconds: dict[str, float]
    samples_per_s: float
    lr: float
    time: str
    ranks: list[RankRecord] = field(default_factory=list)


def by_rank(history: Sequence[EpochRecord]) -> list[tuple[RankRecord, ...]]:
    """Return the records of each rank, for the epochs with the last one's number of ranks."""
    last = len(history[-1].ranks) if history else 0
    return list(zip(*(epoch.ranks for epoch in history if len(epoch.ranks) == last), strict=True))


@dataclass(frozen=True)
class World:
    """The ranks, hosts and threads of a run."""

    ranks: int = 1  # the world size
    hosts: int = 1  # the number of hosts they were on
    threads: int = 1  # threads of each rank


@dataclass(frozen=True)
class RunStart(Record):
    """A start of a run: its first one, or one from a checkpoint."""

    time: str  # of the start, as in an `EpochRecord`
    world: World = field(default_factory=World)  # the ranks from there on
    step: int = 0  # the earlier weight updates
    anew: tuple[str, ...] = ()  # the parts that started over, in words
    batch_size: int | None = None  # `TrainConfig.batch_size` from there on; None: unknown
    lr: float | None = None  # `TrainConfig.lr` from there on; None: unknown
    why: str = ""  # the reason, if the run continued automatically with other ranks; else empty
    lr_why: str = ""  # the rate that a range test has picked, and the reason; empty: there was none


def counting(starts: Sequence[RunStart]) -> list[RunStart]:
    """Return the starts of a run whose steps count, as no later start has repeated them all."""
    found: list[RunStart] = []
    for start in starts:
        while found and found[-1].step >= start.step:
            found.pop()
        found.append(start)
    return found


def ranks_in_turn(starts: Sequence[RunStart]) -> tuple[int, ...]:
    """Return the numbers of ranks that a run had, one after the other; empty if it was always the same."""
    ranks = tuple(count for count, _ in groupby(start.world.ranks for start in counting(starts)))
    return ranks if len(ranks) > 1 else ()


@dataclass(frozen=True)
class Summary(Record):
    """The summary of a finished run.

    Attributes:
        test: on the test part, once, at the end; None without such a part.
        validation: of the final weights on the validation part; None without such a part.
        parameters: the number of the model's trainable numbers.
        epochs: epochs begun.
        complete: whether the last of them was trained to its end.
        steps: weight updates made, as in the last `EpochRecord`.
        samples: training samples that they used.
        seconds: wall time of training, validation included.
        samples_per_s: training samples per second, validation not counted.
        world: its ranks, hosts and threads, at the end.
        versions: of tutti, torch and Python.
        date: the end of the run (UTC, ISO 8601).
        ended_early: why it ended before its last epoch, as a clause; None: it did not.
        best_epoch: the best one; None: unknown.
        best_by: the figure that decides, such as "validation loss".
        restored: whether the final weights are the best epoch's instead of the last.
        ranks_in_turn: the numbers of ranks that it had, one after the other; empty: always as in `world`.
    """

    test: Evaluation | None
    validation: Evaluation | None
    parameters: int
    epochs: int
    steps: int
    samples: int
    seconds: float
    samples_per_s: float
    world: World
    versions: dict[str, str]
    date: str
    complete: bool = True
    ended_early: str | None = None
    best_epoch: int | None = None
    best_by: str = ""
    restored: bool = False
    ranks_in_turn: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, history: list[EpochRecord], test: Evaluation | None, parameters: int, world: World
    ) -> Summary:
        """Summarize a run that ends now, from the records of all its epochs."""
        samples = sum(record.train.samples for record in history)
        seconds = sum(record.seconds["total"] for record in history)
        training = seconds - sum(record.seconds["validation"] for record in history)
        return cls(
            test=test,
            validation=history[-1].validation if history else None,
            parameters=parameters,
            epochs=history[-1].epoch if history else 0,
            steps=history[-1].step if history else 0,
            samples=samples,
            seconds=seconds,
            samples_per_s=samples / training if training > 0 else 0.0,
            world=world,
            versions=versions(),
            date=now(),
            complete=history[-1].complete if history else True,
        )


def now() -> str:
    """Return the time (UTC, ISO 8601, whole seconds)."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of tutti, torch and Python, from the packages' metadata."""
    return {**{name: version(name) for name in ("tutti", "torch")}, "python": platform.python_version()}


@cache  # Metadata take as long to read as a short job to train.
def version(package: str) -> str:
    """Return the version of a package; "unknown" if it runs from its source without being installed."""
    from importlib import metadata  # It would slow every start.

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
