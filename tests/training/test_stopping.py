"""Early stopping: the monitored figure, patience, the target, and the best epoch."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tutti.errors import BadOption, UnknownName, UserError
from tutti.records.run import EpochRecord, Evaluation
from tutti.training.metrics import METRICS, better_of
from tutti.training.stopping import Ending, Goal, Monitor

BETTER = {"loss": "lower", "accuracy": "higher", "f1": None}

values = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan])


def record(
    epoch: int, loss: float, accuracy: float = 0.5, validated: bool = True, **more: float
) -> EpochRecord:
    found = Evaluation(10, loss, {"accuracy": accuracy, **more})
    seconds = {"total": 1.0, "validation": 0.0}
    return EpochRecord(epoch, epoch, True, found, found if validated else None, seconds, 1.0, 0.1, "")


def losses(*values: float) -> list[EpochRecord]:
    return [record(epoch, value) for epoch, value in enumerate(values, start=1)]


def end(ending: Ending, history: list[EpochRecord]) -> int | None:
    """The number of epochs after which the run ends."""
    return next((n for n in range(1, len(history) + 1) if ending.why(history[:n])), None)


@pytest.mark.parametrize(
    ("name", "validated", "figure", "higher"),
    [
        (None, True, "validation loss", False),
        (None, False, "training loss", False),
        ("train_loss", True, "training loss", False),
        ("val_accuracy", True, "validation accuracy", True),
        ("validation accuracy", True, "validation accuracy", True),
        ("training loss", True, "training loss", False),
        ("accuracy", True, "validation accuracy", True),
        ("accuracy", False, "training accuracy", True),
    ],
)
def test_a_monitor_is_a_figure_by_name(name: str | None, validated: bool, figure: str, higher: bool) -> None:
    monitor = Monitor.parse(name, BETTER, validated)
    assert (str(monitor), monitor.higher) == (figure, higher)


@pytest.mark.parametrize(
    ("name", "validated", "error"),
    [
        ("val_", True, UnknownName),
        ("val_acuracy", True, UnknownName),
        ("val_loss", False, BadOption),
        ("val_f1", True, BadOption),  # unknown whether higher values are better
    ],
)
def test_a_figure_that_no_epoch_has_is_refused(name: str, validated: bool, error: type[UserError]) -> None:
    with pytest.raises(error, match="--monitor"):
        Monitor.parse(name, BETTER, validated)


def test_a_target_in_percent_is_refused() -> None:
    with pytest.raises(BadOption, match="--goal"):
        Goal(Monitor("val", "accuracy", higher=True), 97)


@pytest.mark.parametrize(
    ("given", "figure", "value"),
    [
        (0.3, "validation loss", 0.3),
        ("accuracy 0.97", "validation accuracy", 0.97),
        ("accuracy >= 0.97", "validation accuracy", 0.97),
        ("loss<0.3", "validation loss", 0.3),
        ("training accuracy 1e-1", "training accuracy", 0.1),
        ("val_loss 2", "validation loss", 2.0),
    ],
)
def test_a_goal_is_a_figure_and_a_number_or_one_of_the_monitor(
    given: float | str, figure: str, value: float
) -> None:
    goal = Goal.parse(given, Monitor(), BETTER, validated=True)
    assert (str(goal.monitor), goal.value) == (figure, value)


@pytest.mark.parametrize(
    "given", ["accuracy", "accuracy high", "accuracy 97", "acuracy 0.9", "loss nan", "loss > 1"]
)
def test_a_goal_that_no_epoch_can_reach_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="--goal"):
        Goal.parse(given, Monitor(), BETTER, validated=True)


def test_of_every_built_in_metric_it_is_known_which_values_are_better() -> None:
    better = better_of([METRICS[name] for name in METRICS])
    assert set(better) == {"loss", *METRICS}
    assert set(better.values()) <= {"lower", "higher"}
    assert (better["loss"], better["mae"], better["accuracy"]) == ("lower", "lower", "higher")


def test_the_end_has_a_reason() -> None:
    history = losses(0.9, 0.4, 0.5, 0.4)
    why = Ending(patience=2).why(history)
    assert why == "validation loss was not better than in epoch 2 (0.4) for 2 epochs"
    why = Ending(goal=Goal(Monitor("train", "accuracy", higher=True), 0.5)).why(history)
    assert why == "training accuracy was 50.00% in epoch 1; the goal is 0.5"
    assert Ending().why(history) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(values, max_size=12), st.integers(1, 5), values.filter(math.isfinite), st.booleans())
def test_a_run_ends_after_the_first_epoch_of_which_its_rule_is_true(
    column: list[float], patience: int, target: float, higher: bool
) -> None:
    history = [record(n, 1.0, mae=value) for n, value in enumerate(column, start=1)]
    monitor = Monitor("val", "mae", higher)
    worst, sign = -math.inf, 1 if higher else -1
    ranked = [worst if math.isnan(value) else sign * value for value in column]

    def reached(n: int) -> bool:
        return ranked[n - 1] >= sign * target and not math.isnan(column[n - 1])

    def stands(n: int) -> bool:
        return n > patience and max(ranked[n - patience : n]) <= max(ranked[: n - patience])

    numbers = range(1, len(column) + 1)
    assert end(Ending(monitor, patience), history) == next(filter(stands, numbers), None)
    assert end(Ending(goal=Goal(monitor, target)), history) == next(filter(reached, numbers), None)
