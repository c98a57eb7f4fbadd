"""The figure that a study compares runs by: the loss, a metric, or a cost. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tutti.errors import BadOption, BadRunFolder, UnknownName
from tutti.records.run import EpochRecord, Evaluation, Summary
from tutti.records.texts import HIGHER, LOWER, better_by_name, is_share, metric_text

Metric = str | Callable[..., object]
"""A name, a function, or its place such as "mine.py:hits"."""

LOSS: Final = "loss"
AUTO: Final = "auto"
"""The score "auto": the first metric of the runs, or else the loss."""

SECONDS: Final = "seconds"
PARAMETERS: Final = "parameters"

COSTS: Final = (SECONDS, PARAMETERS)
"""The figures of a run that need no validation part."""

AUTOMATIC: Final = ("accuracy", "mae", "rmse", "r2")
"""The metrics that "auto" may mean, by the kind of targets."""


@dataclass(frozen=True)
class Score:
    """A figure of a run, and which of its values are better."""

    name: str  # "loss" or a metric on the validation part, "seconds" of training, or "parameters"
    higher: bool  # whether higher values are better

    def __str__(self) -> str:
        return self.name if _better(self.name) == self.better else f"{self.name}:{self.better}"

    @classmethod
    def read(cls, text: str) -> Score:
        """Return the score that `str` has written."""
        name, _, better = text.partition(":")
        return cls(name, (better or _better(name)) == "higher")

    @property
    def better(self) -> str:
        """The direction of better values: "higher" or "lower"."""
        return "higher" if self.higher else "lower"

    @property
    def by_epoch(self) -> bool:
        """True if each epoch has a value, so that runs can be compared before they end."""
        return self.name not in COSTS

    @property
    def is_share(self) -> bool:
        """True if it is a share, shown in percent."""
        return is_share(self.name)

    def of(self, run: Summary) -> float:
        """Return the value of a finished run."""
        if self.name == SECONDS:
            return run.seconds
        return float(run.parameters) if self.name == PARAMETERS else self._of(run.validation)

    def at(self, epoch: EpochRecord) -> float:
        """Return the value after an epoch."""
        return self._of(epoch.validation)

    def _of(self, evaluation: Evaluation | None) -> float:
        values = {} if evaluation is None else {LOSS: evaluation.loss, **evaluation.metrics}
        if self.name not in values:
            raise BadRunFolder(
                f"the runs have no '{self.name}' on a validation part, but {', '.join(values) or 'nothing'}; "
                "name it in --metrics, and see --validation"
            )
        return values[self.name]

    def text(self, value: float) -> str:
        """Return a value as text; empty if it is missing."""
        return "" if math.isnan(value) else metric_text(self.name, value)


def score_of(given: Metric, metrics: Metric | Sequence[Metric], option: str) -> tuple[Score, Any]:
    """Return a score, and the metrics of the runs with the one that it needs.

    A text may end in ":higher" or ":lower". `option` names the option in messages.
    """
    text, better = given, ""
    if isinstance(given, str):
        text, _, better = given.rpartition(":") if given.endswith((":higher", ":lower")) else (given, "", "")
    name = name_of(text)
    listed = _listed(metrics)
    known = {*map(name_of, listed), LOSS, *COSTS}
    known |= {*AUTOMATIC} if "auto" in known else set()
    direction = better or _better(name)
    if isinstance(text, str) and ":" not in text and name not in known and _better(name) is None:
        raise UnknownName("metric", name, {*HIGHER, *LOWER, *known} - {"auto", "none"}, of=option)
    if direction is None:
        how = f"{text}:higher or {text}:lower"
        how = how if isinstance(text, str) else f"'{name}:higher' or '{name}:lower', and metrics=[{name}]"
        raise BadOption(f"{option} does not say which values of '{name}' are better; write {how}")
    score = Score(name, direction == "higher")
    if name in known:
        return score, metrics
    several = [*(one for one in listed if one != "none"), text]
    texts = [one for one in several if isinstance(one, str)]
    return score, ",".join(texts) if len(texts) == len(several) else several


def scores_of(
    given: Sequence[Metric], metrics: Metric | Sequence[Metric], option: str
) -> tuple[list[Score], Any]:
    """Return several scores, and the metrics of the runs with the ones that they need."""
    scores = []
    for one in given:
        score, metrics = (Score(AUTO, True), metrics) if one == AUTO else score_of(one, metrics, option)
        scores.append(score)
    return scores, metrics


def score_by_metrics(evaluations: Sequence[Evaluation]) -> Score:
    """Return the score by the first metric that all runs have, or else by the loss."""
    names = evaluations[0].metrics if evaluations else ()
    return first_score([name for name in names if all(name in one.metrics for one in evaluations)])


def first_score(metrics: Iterable[str]) -> Score:
    """Return the score by the first metric with a known direction, or else by the loss."""
    return Score.read(next(filter(better_by_name, metrics), LOSS))


def name_of(metric: Metric) -> str:
    """Return the name of a metric in the records of a run."""
    if isinstance(metric, str):
        return metric.rpartition(":")[2]
    return str(getattr(metric, "__name__", type(metric).__name__))


def _better(name: str) -> str | None:
    return "lower" if name in COSTS else better_by_name(name)


def _listed(metrics: Metric | Sequence[Metric]) -> list[Metric]:
    if isinstance(metrics, str):
        return [word.strip() for word in metrics.split(",") if word.strip()]
    return [metrics] if callable(metrics) else [*metrics]
