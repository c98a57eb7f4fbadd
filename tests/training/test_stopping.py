"""Rules that say when to stop: their words, and what they say about histories."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import BadOption, UserError
from tutti.records.run import EpochRecord, Evaluation
from tutti.training.metrics import METRICS, better_of
from tutti.training.stopping import (
    DIRECTIONS,
    PARTS,
    RELATIONS,
    Criterion,
    Ending,
    Limit,
    Quantity,
    Standstill,
    StopRule,
)

BETTER = {"loss": "lower", "accuracy": "higher", "f1": None}

counts = st.integers(1, 5)
quantities = st.builds(Quantity, st.sampled_from(PARTS), st.sampled_from(["loss", "mae", "own_metric"]))
numbers = st.floats(allow_nan=False, allow_infinity=False)
limits = st.builds(Limit, quantities, st.sampled_from(list(RELATIONS)), numbers)
standstills = st.builds(Standstill, quantities, st.sampled_from(DIRECTIONS), counts)
conditions = st.builds(Criterion, limits | standstills, st.integers(0, 5))
rules = st.builds(StopRule, st.lists(conditions, min_size=1, max_size=4).map(tuple))

values = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan])


def record(
    epoch: int, loss: float, accuracy: float = 0.5, validated: bool = True, **more: float
) -> EpochRecord:
    found = Evaluation(10, loss, {"accuracy": accuracy, **more})
    seconds = {"total": 1.0, "validation": 0.0}
    return EpochRecord(epoch, epoch, True, found, found if validated else None, seconds, 1.0, 0.1, "")


def losses(*values: float) -> list[EpochRecord]:
    return [record(epoch, value) for epoch, value in enumerate(values, start=1)]


def first_stop(rule: str, history: list[EpochRecord]) -> int | None:
    """The number of epochs after which the rule says stop."""
    parsed = StopRule.parse(rule)
    return next((n for n in range(1, len(history) + 1) if parsed.why(history[:n], BETTER)), None)


# --- the words


@given(rules)
def test_a_rule_is_parsed_to_what_it_was_printed_from(rule: StopRule) -> None:
    assert StopRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("validation  loss not better for 4 epochs", "validation loss not better for 4 epochs"),
        ("validation accuracy>=97%", "validation accuracy >= 0.97"),
        ("validation accuracy >= 99.9%", "validation accuracy >= 0.999"),
        (
            "validation accuracy >= 99.9 % or training loss < .1",
            "validation accuracy >= 0.999 or training loss < 0.1",
        ),
        ("training loss < 1e-3", "training loss < 0.001"),
        (
            "after 3 epochs, validation accuracy < .5 or training loss not lower for 1 epochs",
            "after 3 epochs validation accuracy < 0.5 or training loss not lower for 1 epoch",
        ),
    ],
)
def test_what_may_be_written_in_other_ways_is_printed_in_one(text: str, printed: str) -> None:
    assert str(StopRule.parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'training', 'validation' or 'after' is expected first, but there is nothing"),
        ("validaton loss < 1", "there is 'validaton' (did you mean 'validation'?)"),
        ("loss < 1", "'training', 'validation' or 'after' is expected first, but there is 'loss'"),
        (
            "validation not better for 4 epochs",
            "the name of a metric, or 'loss' is expected behind 'validation'",
        ),
        ("validation loss = 1", "behind 'validation loss', but there is '='"),
        ("validation loss =< 1", "behind 'validation loss', but there is '='"),
        ("validation loss < one", "a number is expected behind 'validation loss <', but there is 'one'"),
        ("validation loss < nan", "a number is expected"),
        ("validation loss < 1e999", "a number is expected"),
        ("validation loss <", "but there is nothing"),
        ("validation accuracy >= 97", "a number from 0 to 1, or from 0% to 100%"),
        ("validation loss not beter for 4 epochs", "did you mean 'better'?"),
        ("validation loss not better in 4 epochs", "'for' is expected behind 'validation loss not better'"),
        ("validation loss not better for 0 epochs", "a whole number from 1 is expected"),
        ("validation loss not better for -1 epochs", "a whole number from 1 is expected"),
        ("validation loss not better for 2.5 epochs", "a whole number from 1 is expected"),
        ("validation loss not better for 4 steps", "'epochs' or 'epoch' is expected"),
        ("validation loss < 1 and training loss < 1", "'or' is expected behind 'validation loss < 1'"),
        ("validation loss < 1 or", "but there is nothing"),
        ("after 3 epochs", "'training' or 'validation' is expected behind 'after 3 epochs'"),
        ("after 3 epochs after 3 epochs training loss < 1", "but there is 'after'"),
    ],
)
def test_what_is_no_rule_is_refused_with_what_is_expected_where(text: str, complaint: str) -> None:
    with pytest.raises(BadOption) as refused:
        StopRule.parse(text)
    assert complaint in str(refused.value)
    assert "not better for 4 epochs" in str(refused.value).partition(";")[2]


@given(
    st.text()
    | st.lists(st.sampled_from([*PARTS, *DIRECTIONS, "or", "not", "<", "9", "9%", "after"])).map(" ".join)
)
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    try:
        rule = StopRule.parse(text)
    except BadOption:
        return
    assert StopRule.parse(str(rule)) == rule


# --- the figures of a run


@pytest.mark.parametrize(
    ("rule", "validated", "complaint"),
    [
        ("validation acuracy >= 0.9", True, "unknown metric 'acuracy' of --stop; did you mean 'accuracy'?"),
        (
            "training mae < 1 or training loss < 1",
            True,
            "unknown metric 'mae' of --stop. Known: accuracy, f1, loss.",
        ),
        ("training loss < 1 or validation loss < 1", False, "write 'training loss'"),
        ("validation f1 not better for 2 epochs", True, "write 'not lower' or 'not higher'"),
    ],
)
def test_a_figure_that_no_epoch_has_is_refused(rule: str, validated: bool, complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        Ending(StopRule.parse(rule), BETTER, validated)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "validated"),
    [
        ("training loss < 1", False),
        ("validation f1 not higher for 2 epochs", True),
        ("validation f1 >= 0.5 or validation loss not better for 3 epochs", True),
    ],
)
def test_a_figure_that_there_is_may_be_used(rule: str, validated: bool) -> None:
    StopRule.parse(rule).check(BETTER, validated)


def test_of_every_built_in_metric_it_is_known_which_values_are_better() -> None:
    better = better_of([METRICS[name] for name in METRICS])
    assert set(better) == {"loss", *METRICS}
    assert set(better.values()) <= {"lower", "higher"}
    assert (better["loss"], better["mae"], better["accuracy"]) == ("lower", "lower", "higher")


def test_rules_need_no_torch() -> None:
    program = "import sys, tutti.training.stopping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# --- what a rule says


def test_a_rule_says_why() -> None:
    history = losses(0.9, 0.4, 0.5, 0.4)
    assert StopRule.parse("validation loss not better for 2 epochs").why(history, BETTER) == (
        "validation loss was not better than in epoch 2 (0.4) for 2 epochs"
    )
    assert StopRule.parse("validation loss < 0.1 or training accuracy >= 50%").why(history, BETTER) == (
        "training accuracy was 50.00% in epoch 1, >= 0.5"
    )


def test_the_first_epoch_is_none_in_which_nothing_got_better() -> None:
    assert first_stop("validation loss not better for 1 epoch", losses(1.0, 1.0)) == 2
    assert first_stop("validation loss not better for 1 epoch", losses(math.nan, math.nan)) == 2


def test_after_so_many_epochs_the_epoch_with_this_number_counts() -> None:
    assert first_stop("after 3 epochs validation loss > 0.5", losses(1.0, 1.0, 1.0, 1.0)) == 3
    assert first_stop("after 3 epochs validation loss > 0.5", losses(1.0, 1.0, 0.1, 0.1, 1.0)) == 5
    assert first_stop("after 4 epochs validation loss not better for 1 epoch", losses(1, 1, 1, 1)) == 4


def test_epochs_without_validation_are_not_counted() -> None:
    history = [record(epoch, 1.0, validated=epoch % 2 == 0) for epoch in range(1, 9)]
    assert first_stop("validation loss not better for 2 epochs", history) == 6


@given(st.lists(st.tuples(values, values), max_size=12), limits, standstills, st.integers(0, 5))
def test_a_rule_stops_where_its_words_say(
    figures: list[tuple[float, float]], limit: Limit, standstill: Standstill, after: int
) -> None:
    history = [record(n, loss, mae=mae, own_metric=mae) for n, (loss, mae) in enumerate(figures, start=1)]
    better = {"loss": "lower", "mae": "lower", "own_metric": "higher"}
    for what in (limit, standstill):
        rule = StopRule((Criterion(what, after),))
        said = [rule.why(history[:n], better) is not None for n in range(1, len(history) + 1)]
        column = [figure[what.quantity.metric != "loss"] for figure in figures]
        direction = what.direction
        if direction == "better":
            direction = better[what.quantity.metric]
        read = [
            any(true_at(what, direction, column[:m]) for m in range(max(1, after), n + 1))
            for n in range(1, len(history) + 1)
        ]
        assert said == read


def true_at(what: Limit | Standstill, direction: str | None, column: list[float]) -> bool:
    """Whether the words are true of the last of these values, read naively."""
    if isinstance(what, Limit):
        return bool(eval(f"{column[-1]!r} {what.relation} {what.number!r}", {"nan": math.nan}))
    earlier, last = column[: -what.epochs], column[-what.epochs :]
    if not earlier:
        return False
    # What is not a number is worse than everything.
    worst = math.inf if direction == "lower" else -math.inf
    known = [[worst if math.isnan(value) else value for value in part] for part in (earlier, last)]
    if direction == "lower":
        return min(known[1]) >= min(known[0])
    return max(known[1]) <= max(known[0])


@given(st.lists(st.tuples(values, values), max_size=8), rules)
def test_a_reason_to_stop_stays_one(figures: list[tuple[float, float]], rule: StopRule) -> None:
    history = [record(n, loss, mae=mae, own_metric=mae) for n, (loss, mae) in enumerate(figures, start=1)]
    better = {"loss": "lower", "mae": "lower", "own_metric": "higher"}
    said = [rule.why(history[:n], better) for n in range(len(history) + 1)]
    reasons = [reason is not None for reason in said]
    assert reasons == sorted(reasons)


# --- the best epoch


@pytest.mark.parametrize(
    ("rule", "validated", "quantity", "higher"),
    [
        (None, True, "validation loss", False),
        (None, False, "training loss", False),
        ("training accuracy >= 0.9 or validation loss < 1", True, "training accuracy", True),
        ("validation f1 >= 0.9", True, "validation loss", False),
        ("validation f1 >= 0.9 or validation f1 not higher for 2 epochs", True, "validation f1", True),
    ],
)
def test_epochs_are_compared_by_the_first_figure_of_the_rule(
    rule: str | None, validated: bool, quantity: str, higher: bool
) -> None:
    ranking = Ending(None if rule is None else StopRule.parse(rule), BETTER, validated).ranking
    assert (str(ranking.quantity), ranking.higher) == (quantity, higher)


def test_the_best_epoch_is_the_first_of_the_best() -> None:
    ranking = Ending().ranking
    best = ranking.best(losses(math.nan, 0.5, 0.25, math.nan, 0.25))
    assert best is not None
    assert best.epoch == 3
    assert ranking.best([]) is None
    assert ranking.best(losses(math.nan)) is None


def test_the_score_of_an_epoch_is_the_higher_the_better() -> None:
    epoch = record(1, 0.25, accuracy=0.75)
    assert Ending().ranking.score(epoch) == -0.25
    assert Ending(StopRule.parse("validation accuracy > 0.5"), BETTER).ranking.score(epoch) == 0.75
    assert Ending().ranking.score(record(1, 0.25, validated=False)) is None
