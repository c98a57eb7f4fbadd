"""Early stopping, as in Keras and Lightning: a monitored figure, patience and a goal. Needs no torch.

Whether a run ends depends only on the figures of its epochs, so a resumed run ends where it would have ended
without the interruption.
"""

from __future__ import annotations

import math
import re
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

_GOAL: Final = re.compile(r"(.*?)\s*([<>]?)=?\s*([^\s<>=]*)\s*", re.DOTALL)
"""The figure of a goal, the direction, and the number."""

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
    def parse(cls, name: str | None, better: Better, validated: bool, option: str = "--monitor") -> Monitor:
        """Return the figure with a name, such as "val_loss", "validation loss" or "accuracy"; None: the loss.

        Without a part it is that of the validation part, or else of the training part. `better` are the
        figures of the run; `validated` is whether it has a validation part.
        """
        usual = "val" if validated else "train"
        first, *rest = re.split(r"[\s_]+", (name or LOSS).strip(), maxsplit=1)
        known = first if first in PARTS else {word: part for part, word in PARTS.items()}.get(first)
        part, metric = (known, rest[0]) if known and rest else (usual, str(name or LOSS).strip())
        metric = metric if metric in better else metric.replace(" ", "_")
        if metric not in better:
            hint = "Others are computed if --metrics names them."
            raise UnknownName("metric", metric, better, hint, of=option)
        if part == "val" and not validated:
            raise BadOption(
                f"{option} is '{name}', but no samples are kept for validation; give --validation 0.1, or "
                f"{option} 'training {metric}'"
            )
        if better[metric] is None:
            raise BadOption(
                f"{option} is '{name}', but it is unknown whether higher values are better; name "
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
class Goal:
    """The value of a figure at which a run ends."""

    monitor: Monitor
    value: float

    def __post_init__(self) -> None:
        if is_share(self.monitor.metric) and not 0 <= self.value <= 1:
            raise BadOption(f"--goal is {self.value:g}; {self.monitor.metric} is a share, from 0 to 1")

    @classmethod
    def parse(cls, given: float | str, monitor: Monitor, better: Better, validated: bool) -> Goal:
        """Return the goal of a number, which is one of `monitor`, or of a text.

        Such as "accuracy 0.97", also "accuracy >= 0.97".
        """
        match = _GOAL.fullmatch(str(given))
        assert match is not None, "each of its parts may be empty"
        words, sign, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadOption(f"--goal is '{given}'; give a figure and a number, such as 'accuracy 0.97'")
        named = Monitor.parse(words, better, validated, "--goal") if words else monitor
        if sign == ("<" if named.higher else ">"):
            better_if = "higher" if named.higher else "lower"
            raise BadOption(f"--goal is '{given}', but {better_if} values of {named.metric} are better")
        return cls(named, value)

    def reached(self, history: Iterable[EpochRecord]) -> str | None:
        """Return which epoch reached it, as a clause; None: none did."""
        for record in history:
            value = self.monitor.of(record)
            if value is None or math.isnan(value) or self.monitor.is_better(self.value, value):
                continue
            shown = self.monitor.text(value)
            return f"{self.monitor} was {shown} in epoch {record.epoch}; the goal is {self.value!r}"
        return None


@dataclass(frozen=True)
class Ending:
    """The rules by which the figures of its epochs end a run."""

    monitor: Monitor = Monitor()
    patience: int | None = None  # end after this number of epochs without a better value
    goal: Goal | None = None  # end when its figure is at least as good
    restores_best: bool = False  # the final weights are those of the best epoch
    average: Averaging | None = None  # of the weights, judged in their place
    told: tuple[Callable[[], str | None], ...] = ()  # further reasons to end, asked each epoch (collective)

    def why(self, history: Sequence[EpochRecord]) -> str | None:
        """Return why to end after these epochs, as a clause; None: go on (collective)."""
        reached = None if self.goal is None else self.goal.reached(history)
        reason = reached or self._patience_exhausted(history)
        told = [why() for why in self.told]
        return reason or next(filter(None, told), None)

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
