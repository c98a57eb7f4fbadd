"""The figure that candidates are compared by, as it was asked for. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tutti.errors import BadOption, UnknownName
from tutti.load_object import names_object
from tutti.records.texts import better_by_name
from tutti.studies.cross_validation.scores import MEASURES

AUTO: Final = "auto"
LOSS: Final = "loss"

_BETTER: Final = ("higher", "lower")

Metric = str | Callable[..., object]
"""A name, or a function."""


@dataclass(frozen=True)
class AskedScore:
    """The figure that candidates are compared by.

    Attributes:
        name: "auto", or as `measure_of` takes it.
        metric: what the runs must compute for it; None: nothing, as predictions or the loss tell it.
    """

    name: str
    metric: Metric | None = None

    def among(self, metrics: Metric | Sequence[Metric]) -> Metric | Sequence[Metric]:
        """Return the metrics of the runs, with its own."""
        if self.metric is None:
            return metrics
        if isinstance(metrics, str) and isinstance(self.metric, str):
            words = [word for word in _words(metrics) if word != "none"]
            return ",".join(words if self.metric in words else [*words, self.metric])
        several = _listed(metrics)
        return several if self.metric in several else [*several, self.metric]


def asked_score(given: object, option: str, metrics: Metric | Sequence[Metric] = AUTO) -> AskedScore:
    """Return what a score means.

    Args:
        given: "auto", a name in `MEASURES`, "loss", or what is a metric of runs: its name, a function, or a
            function's place such as "mine.py:hits". A text may end in ":higher" or ":lower".
        option: what it was given as, for messages.
        metrics: those that the runs compute.

    Raises:
        UnknownName: it is none.
        BadOption: it is not known which of its values are better.
    """
    if isinstance(given, str):
        text, _, better = given.rpartition(":") if given.endswith(_BETTER) else (given, "", "")
        name = text.rpartition(":")[2]
    elif callable(given):
        text, better, name = "", "", str(getattr(given, "__name__", type(given).__name__))
    else:
        raise BadOption(f"{option} is a {type(given).__name__}; give the name of a metric, or a function")
    known = {_name(one) for one in _listed(metrics)}
    own = not isinstance(given, str) or names_object(text)
    if text == AUTO or (name in MEASURES and not own):
        return AskedScore(text)
    if name in MEASURES:
        raise BadOption(
            f"{option} is a function called '{name}', as a figure of its own is; call it otherwise"
        )
    said = better or better_by_name(name)
    if not own and name not in known and said is None:
        raise UnknownName("value", name, [AUTO, LOSS, *MEASURES, *known - {AUTO, "none"}], of=option)
    if said is None:
        how = (
            f"{text}:higher or {text}:lower"
            if text
            else f"metrics=[{name}] and '{name}:higher' or '{name}:lower'"
        )
        raise BadOption(f"{option} does not say which values of '{name}' are better; write {how}")
    label = name if better_by_name(name) == said else f"{name}:{said}"
    if name in known or name == LOSS:
        return AskedScore(label)
    return AskedScore(label, text or given)


def _listed(metrics: Metric | Sequence[Metric]) -> list[Metric]:
    if isinstance(metrics, str):
        return [*_words(metrics)]
    return [metrics] if callable(metrics) else [*metrics]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _name(metric: Metric) -> str:
    """Return what a metric is called in the records of a run."""
    if isinstance(metric, str):
        return metric.rpartition(":")[2]
    return str(getattr(metric, "__name__", type(metric).__name__))
