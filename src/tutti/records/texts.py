"""Records as text: figures, epochs, durations. Needs neither torch nor MPI."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from tutti.records.run import EpochRecord, Evaluation, RunStart, Summary

SHARES: Final = (*("accuracy", "balanced_accuracy", "precision", "recall"),)
"""Metrics that are shown as percentages, besides `TOP`."""

TOP: Final = re.compile(r"top([1-9][0-9]{0,5})")
"""The names of metrics that are the share of labels among the k largest scores."""

HIGHER: Final = (*SHARES, "f1", "auc", "average_precision", "r2")
"""Metrics whose higher values are better."""

LOWER: Final = ("loss", "mae", "mse", "rmse")
"""The loss, and metrics whose lower values are better."""

MOST_IN_TURN: Final = 5
"""Of more numbers of ranks that a run had in turn, the smallest and the largest are named."""


@dataclass(frozen=True)
class RunLength:
    """The length of a run."""

    updates: int  # weight updates of the whole run
    per_epoch: int  # of one epoch
    # additional steps, as other numbers of workers have made epochs of more or fewer updates; below 0: fewer
    counted: int = 0

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.updates + self.counted

    def place(self, step: int) -> int:
        """Return the place of a step among the updates."""
        return step - self.counted

    def epoch_behind(self, step: int) -> int:
        """Return the epoch that continues after a step, from 1."""
        return self.place(step) // self.per_epoch + 1

    @property
    def epochs(self) -> int:
        """The number of epochs, an unfinished one included."""
        return -(-self.updates // self.per_epoch)

    def label(self, epoch: int) -> str:
        """Name an epoch, such as "epoch  3/30"; of a run shorter than one, its number of steps."""
        if self.updates < self.per_epoch:
            return plural(self.updates, "step")
        part = " (part)" if epoch == self.epochs and self.updates % self.per_epoch else ""
        return f"epoch {epoch:>{len(str(self.epochs))}}/{self.epochs}{part}"


def plural(count: int, noun: str) -> str:
    """Return a number of things as text, such as "1 rank" or "1,000 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def is_share(name: str) -> bool:
    """Return whether a metric is a share, which is shown in percent."""
    return name in SHARES or TOP.fullmatch(name) is not None


def better_by_name(name: str) -> str | None:
    """Return whether "higher" or "lower" values of a metric are better; None: unknown by its name.

    Names of functions end like scikit-learn's: in _score if higher values are better, in _error or _loss if
    lower ones are (its User Guide, section 3.4).
    """
    if name in HIGHER or is_share(name) or name.endswith("_score"):
        return "higher"
    return "lower" if name in LOWER or name.endswith(("_error", "_loss")) else None


def metric_text(name: str, value: float) -> str:
    """Return the value of a metric: a share of the samples in percent, a large amount in whole numbers."""
    if math.isnan(value):
        return "nan"
    if is_share(name):
        return f"{value:.2%}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def loss_text(loss: float) -> str:
    """Return a loss, that of large amounts in whole numbers."""
    return f"{loss:.4f}" if not abs(loss) >= 1e4 else metric_text("loss", loss)


def figures(evaluation: Evaluation) -> str:
    """Return loss and metrics in one line, such as "loss 0.2154  accuracy 93.12%"."""
    metrics = (f"{name} {metric_text(name, value)}" for name, value in evaluation.metrics.items())
    return "  ".join((f"loss {loss_text(evaluation.loss)}", *metrics))


def epoch_text(record: EpochRecord) -> str:
    """Return the figures of an epoch that has ended, in one line."""
    validation = f"  validation {figures(record.validation)}" if record.validation else ""
    return f"{figures(record.train)}{validation}  {record.samples_per_s:,.0f} samples/s"


def ranks_text(ranks: Sequence[int]) -> str:
    """Say on how many ranks a run was trained, such as "1, 2 and 4 ranks in turn"; many are summed up."""
    *before, last = ranks
    if not before:
        return plural(last, "rank")
    if len(ranks) > MOST_IN_TURN:
        return f"{min(ranks):,} to {max(ranks):,} ranks in turn"
    return f"{', '.join(f'{count:,}' for count in before)} and {last:,} ranks in turn"


def span_text(counts: Sequence[int]) -> str:
    """Return the smallest and the largest of some counts, such as "1-4"; of equal ones that."""
    return f"{min(counts)}-{max(counts)}" if min(counts) < max(counts) else str(min(counts))


def resumed_text(start: RunStart, before: RunStart | None = None) -> str:
    """Say where a run went on, on how many ranks, why, and what started over."""
    world, anew = start.world, start.anew
    ranks = plural(world.ranks, "rank")
    ranks += f" of {world.hosts} hosts" if world.hosts > 1 else ""
    if before is None or before.world.ranks == world.ranks:
        text = f"resumed after step {start.step:,} on {ranks}"
    else:
        text = f"changed from {before.world.ranks} to {ranks} after step {start.step:,}"
    text += f"; reason: {start.why}" if start.why else ""
    return text + (f"; what starts over: {', '.join(anew)}" if anew else "")


def early_text(summary: Summary) -> str | None:
    """Say why a run ended early; None: it did not."""
    if summary.ended_early is None:
        return None
    return f"ended early, after epoch {summary.epochs}: {summary.ended_early}"


def best_text(summary: Summary, history: Sequence[EpochRecord]) -> str | None:
    """Say which epoch was the best, and whether its weights are the final ones; None: there is no other."""
    best = next((record for record in history if record.epoch == summary.best_epoch), None)
    if best is None or summary.epochs == 1:
        return None
    part, _, metric = summary.best_by.partition(" ")
    evaluation = best.validation if part == "validation" else best.train
    values = {} if evaluation is None else {"loss": evaluation.loss, **evaluation.metrics}
    value = f" {metric_text(metric, values[metric])}" if metric in values else ""
    text = f"epoch {best.epoch} of {summary.epochs} was the best, by its {summary.best_by}{value}"
    if best.epoch == summary.epochs:
        return f"{text}; the final weights are its own"
    if summary.restored:
        return f"{text}; its weights were restored"
    return f"{text}; the final weights are those of the last epoch, as --restore-best was not given"


def duration(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_JOINERS: Final = "\u200c\u200d"
"""Invisible letters that join or part their neighbours, in several scripts."""


def printable(text: str, lines: bool = False) -> str:
    """Return a text that is safe to print: control characters, which a terminal would obey, are escaped."""
    if text.isprintable():
        return text
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text
    )


Shape: TypeAlias = "tuple[int, ...] | dict[str, tuple[int, ...]] | tuple[tuple[int, ...], ...]"
"""The shape of one input, such as (1, 28, 28); of each by name; or of each by position."""


def several(shape: Shape) -> bool:
    """Return whether a shape has several inputs."""
    return isinstance(shape, dict) or any(isinstance(one, tuple) for one in shape)


def described(shape: Shape) -> str:
    """Describe the shape of one input, such as 1x28x28, or of several, such as image 1x28x28 and age 1."""
    if isinstance(shape, dict):
        return " and ".join(f"{name} {described(one)}" for name, one in shape.items())
    if several(shape):
        return " and ".join(map(described, cast("tuple[Shape, ...]", shape)))
    return "x".join(map(str, shape)) or "1"
