"""Objectives of a search. Needs neither torch nor Optuna."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tutti.errors import BadOption
from tutti.records.run import EpochRecord, Evaluation, Summary
from tutti.records.texts import HIGHER, LOWER, better_by_name
from tutti.studies.cross_validation.asked_score import Metric, asked_score

LOSS: Final = "loss"
SECONDS: Final = "seconds"
PARAMETERS: Final = "parameters"

COSTS: Final = (SECONDS, PARAMETERS)
"""The objectives that are no figures of an evaluation."""


@dataclass(frozen=True)
class Aim:
    """One figure of a trial that is to be high, or low.

    Attributes:
        name: "loss" or a metric, on the validation part; "seconds" of training, or "parameters" of the model.
        higher: whether higher values are better.
    """

    name: str
    higher: bool

    def __str__(self) -> str:
        return self.name if _better(self.name) == self.better else f"{self.name}:{self.better}"

    @property
    def better(self) -> str:
        """Direction of better values: "higher" or "lower"."""
        return "higher" if self.higher else "lower"

    @property
    def by_epoch(self) -> bool:
        """True if each epoch has a value, by which trials can be compared before their end."""
        return self.name not in COSTS

    def of(self, run: Summary) -> float:
        """Return the value of a finished run.

        Raises:
            BadOption: the run has none.
        """
        if self.name == SECONDS:
            return run.seconds
        return float(run.parameters) if self.name == PARAMETERS else self._of(run.validation)

    def at(self, epoch: EpochRecord) -> float:
        """Return the value after an epoch.

        Raises:
            BadOption: it has none.
        """
        return self._of(epoch.validation)

    def _of(self, found: Evaluation | None) -> float:
        if found is None:
            raise BadOption(
                f"--objective {self.name} is of the validation part, and there is none; see --validation"
            )
        if self.name == LOSS:
            return found.loss
        if self.name not in found.metrics:
            raise BadOption(
                f"--objective {self.name}: the trials have {', '.join([LOSS, *found.metrics])}; others are "
                "computed if --metrics names them"
            )
        return found.metrics[self.name]


def aims_of(names: Sequence[str]) -> list[Aim]:
    """Return the aims of these names: "accuracy", or "my_metric:higher".

    Raises:
        BadOption: one is there twice, or it is not known which of its values are better.
    """
    found = [_aim(name) for name in names]
    called = [aim.name for aim in found]
    if not found:
        raise BadOption("--objective names nothing; give accuracy, loss, or another metric")
    for name in called:
        if called.count(name) > 1:
            raise BadOption(f"--objective names '{name}' twice; name each once")
    return found


def with_own(names: Sequence[Metric], metrics: Metric | Sequence[Metric]) -> tuple[list[str], Any]:
    """Take functions among objectives for metrics of the runs.

    Args:
        names: of objectives; functions, or places of functions such as "mine.py:hits:higher".
        metrics: those that the runs compute.

    Returns:
        The names as `aims_of` takes them, and the metrics with those functions.

    Raises:
        BadOption: it is not known which values of one are better.
    """
    found = []
    for one in names:
        text = one.removesuffix(":higher").removesuffix(":lower") if isinstance(one, str) else one
        if isinstance(text, str) and not (text.endswith(".py") or ":" in text):
            found.append(str(one))
            continue
        asked = asked_score(one, "--objective", metrics)
        found.append(asked.name)
        metrics = asked.among(metrics)
    return found, metrics


def _better(name: str) -> str | None:
    """Return which values of an objective are better, "higher" or "lower"; None: it is not known."""
    return "lower" if name in COSTS else better_by_name(name)


def _aim(text: str) -> Aim:
    name, colon, better = text.partition(":")
    better = better if colon else _better(name) or ""
    if better not in ("higher", "lower"):
        near = difflib.get_close_matches(name, [*HIGHER, *LOWER, *COSTS], n=1)
        known = f"; did you mean '{near[0]}'? If not," if near and not colon else ";"
        raise BadOption(
            f"--objective {text} does not say which values of '{name}' are better{known} write "
            f"{name}:higher or {name}:lower"
        )
    return Aim(name, better == "higher")
