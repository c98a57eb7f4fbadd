"""Early stopping, as in Keras and Lightning: a monitored figure, patience and a goal. Needs no torch.

Whether a run ends depends only on the figures of its epochs, so a resumed run ends where it would have ended
without the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tutti.errors import BadOption, UnknownName
from tutti.records.run import EpochRecord
from tutti.records.texts import is_share, metric_text
from tutti.training.intervals import Averaging

Better: TypeAlias = Mapping[str, str | None]
"""The loss and the metrics of a run: whether "lower" or "higher" values are better; None: unknown."""

LOSS: Final = "loss"

PARTS: Final = {"val": "validation", "train": "training"}
"""The parts of the data, by the first word of a monitored figure."""


@dataclass(frozen=True)
class Monitor:
    """The figure by which epochs are compared."""

    part: str = "val"  # or "train"
    metric: str = LOSS
    higher: bool = False  # whether higher values are better

    def __str__(self) -> str:
        return f"{PARTS[self.part]} {self.metric}"

    @classmethod
    def parse(cls, name: str | None, better: Better, validated: bool) -> Monitor:
        """Return the figure with a name: "val_" or "train_" and the loss or a metric; None: the loss.

        `better` are the figures of the run; `validated` is whether it has a validation part.
        """
        if name is None:
            return cls("val" if validated else "train")
        part, _, metric = name.partition("_")
        if part not in PARTS or not metric:
            raise BadOption(f"--monitor is '{name}'; give val_loss, train_loss, val_accuracy or the like")
        if metric not in better:
            hint = "Others are computed if --metrics names them."
            raise UnknownName("metric", metric, better, hint, of="--monitor")
        if part == "val" and not validated:
            raise BadOption(
                f"--monitor is '{name}', but no samples are kept for validation; give --validation 0.1, or "
                f"--monitor train_{metric}"
            )
        if better[metric] is None:
            raise BadOption(
                f"--monitor is '{name}', but it is unknown whether higher values are better; name "
                "the function ..._score if they are, else ..._error"
            )
        return cls(part, metric, better[metric] == "higher")

    def of(self, record: EpochRecord) -> float | None:
        """Return the value of an epoch; None if it was not computed."""
        evaluation = record.validation if self.part == "val" else record.train
        if evaluation is None:
            return None
        return evaluation.loss if self.metric == LOSS else evaluation.metrics.get(self.metric)

    def best(self, history: Iterable[EpochRecord]) -> EpochRecord | None:
        """Return the best epoch, the first of equals; None if no epoch has a value."""
        best, best_value = None, math.nan
        for record in history:
            value = self.of(record)
            if value is not None and self.is_better(value, best_value):
                best, best_value = record, value
        return best

    def score(self, record: EpochRecord) -> float | None:
        """Return a number that is higher for better epochs; None without a value."""
        value = self.of(record)
        return -value if value is not None and not self.higher else value

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another; every number is better than NaN."""
        if math.isnan(other):
            return not math.isnan(value)
        return value > other if self.higher else value < other

    def text(self, value: float) -> str:
        """Return a value as text."""
        return metric_text(self.metric, value)


@dataclass(frozen=True)
class Ending:
    """The rules by which the figures of its epochs end a run."""

    monitor: Monitor = Monitor()
    patience: int | None = None  # end after this number of epochs without a better value
    goal: float | None = None  # end when the figure is at least as good
    restores_best: bool = False  # the final weights are those of the best epoch
    average: Averaging | None = None  # of the weights, judged in their place
    told: tuple[Callable[[], str | None], ...] = ()  # further reasons to end, asked each epoch (collective)

    def __post_init__(self) -> None:
        if self.goal is not None and is_share(self.monitor.metric) and not 0 <= self.goal <= 1:
            raise BadOption(f"--goal is {self.goal}; {self.monitor.metric} is a share, from 0 to 1")

    def why(self, history: Sequence[EpochRecord]) -> str | None:
        """Return why to end after these epochs, as a clause; None: go on (collective)."""
        reason = self._goal_reached(history) or self._patience_exhausted(history)
        told = [why() for why in self.told]
        return reason or next(filter(None, told), None)

    def _goal_reached(self, history: Sequence[EpochRecord]) -> str | None:
        for record in history:
            value = self.monitor.of(record)
            if self.goal is None or value is None or math.isnan(value):
                continue
            if not self.monitor.is_better(self.goal, value):
                shown = self.monitor.text(value)
                return f"{self.monitor} was {shown} in epoch {record.epoch}; the goal is {self.goal!r}"
        return None

    def _patience_exhausted(self, history: Sequence[EpochRecord]) -> str | None:
        best: float | None = None
        best_epoch = waited = 0
        for record in history:
            value = self.monitor.of(record)
            if value is None:
                continue
            if best is None or self.monitor.is_better(value, best):
                best, best_epoch, waited = value, record.epoch, 0
            else:
                waited += 1
            if self.patience is not None and waited >= self.patience:
                epochs = f"{waited} epoch{'' if waited == 1 else 's'}"
                shown = self.monitor.text(best)
                return f"{self.monitor} was not better than in epoch {best_epoch} ({shown}) for {epochs}"
        return None
