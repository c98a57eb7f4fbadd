"""The recommendations of a plan from made-up measurements."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from tutti.errors import BadModel
from tutti.records.json_lines import to_json
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.race import Entry, Timing
from tutti.studies.autotune.recommendation import Recommendation, Way
from tutti.studies.autotune.twins import REMEDY, Twins

LONELY = Candidate(1, 1, "fp32", "contiguous", 64)
THREADS = Candidate(1, 2, "fp32", "contiguous", 64)
RANKS = Candidate(2, 1, "fp32", "contiguous", 64)
LAST = Candidate(2, 1, "fp32", "channels_last", 64)
SHORT = Candidate(2, 1, "bf16", "contiguous", 64)


def way(candidate: Candidate, *turns: float, stopped: bool = False, steps: int = 9) -> Way:
    first = Timing(1, 64, 64 / turns[0]) if turns else None
    return Entry(candidate, first, dict(enumerate(turns, start=1)), steps, stopped=stopped)


def shown(found: Recommendation) -> list[str]:
    """Return the rows of the table, with single spaces."""
    stream = io.StringIO()
    found.show(stream)
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line[:1].isdigit()]


def test_the_fastest_is_picked_and_the_next_is_named() -> None:
    found = Recommendation([way(THREADS, *[800.0] * 5), way(RANKS, *[1000.0] * 5)])
    assert found.pick.candidate == RANKS
    assert found.why() == [
        "2 ranks x 1 thread: 1,000 samples/s; the next, 1 rank x 2 threads, has 80% of that speed"
    ]


def test_the_simpler_way_wins_a_tie_and_the_tie_is_named() -> None:
    tied = [way(RANKS, 1000.0, 1010.0, 990.0, 1000.0), way(THREADS, 1000.0, 985.0, 1000.0, 990.0)]
    found = Recommendation(tied)
    assert found.pick.candidate == THREADS
    (reason,) = found.why()
    assert "1 rank x 2 threads: 995 samples/s; as fast" in reason
    assert reason.endswith("but not as simple: 2 ranks x 1 thread")


def test_a_single_measured_way_has_a_reason() -> None:
    assert Recommendation([way(RANKS, 1000.0)]).why() == ["2 ranks x 1 thread: 1,000 samples/s; the only way"]
    late = Recommendation([way(RANKS, 1000.0), way(THREADS)])
    assert late.why()[0].endswith(f"no time was left for others: {REMEDY}")


def test_ways_are_named_by_their_differences() -> None:
    found = Recommendation([way(LAST, *[1000.0] * 5), way(RANKS, *[700.0] * 5)])
    assert found.why()[0].startswith(
        "2 ranks x 1 thread, channels_last: 1,000 samples/s; the next, 2 ranks x 1 "
    )
    assert "fp32" not in found.why()[0]


FASTER = [way(RANKS, *[900.0] * 5), way(SHORT, *[1800.0] * 5)]
ALIKE = Twins("bf16", 60, 2.0, (0.5, 0.6, 0.7), (0.51, 0.59, 0.7))
OTHERWISE = Twins("bf16", 60, 2.0, (0.5, 0.6, 0.7), (0.9, 1.0, 1.1))


def test_a_faster_precision_whose_loss_follows_is_picked() -> None:
    ways = [way(RANKS, *[1000.0] * 5), way(THREADS, 500.0)]
    found = Recommendation(ways, FASTER, twins=ALIKE)
    assert found.pick is FASTER[1]
    said = "bf16 is chosen: 2 ranks x 1 thread in bf16 is 2.00 times as fast, and after 60 updates its loss"
    assert found.why()[1].startswith(said)
    assert [found.of_pick(one) for one in (*ways, *FASTER)] == [0.5, 0.25, 0.5, 1.0]
    assert [one is found.pick for one in found.rows()] == [True, False, False]


@pytest.mark.parametrize(
    ("twins", "reason"),
    [
        (OTHERWISE, "is 2.00 times as fast, but after 60 updates its loss differs from fp32's by 66.67%"),
        (None, "it is 2.00 times as fast, but no time was left to compare losses: give"),
    ],
)
def test_a_faster_precision_whose_loss_does_not_follow_is_named_but_not_picked(
    twins: Twins | None, reason: str
) -> None:
    found = Recommendation([way(RANKS, *[1000.0] * 5)], FASTER, twins=twins)
    assert found.pick.candidate == RANKS
    assert found.of_pick(FASTER[1]) == 2.0
    assert reason in found.why()[1]


@pytest.mark.parametrize(
    ("speeds", "times"), [((1200.0,), "1.20"), ((300.0, 300.0), "0.30"), ((1040.0, 1040.0), "1.04")]
)
def test_a_precision_that_is_not_clearly_faster_is_not_picked(speeds: tuple[float, ...], times: str) -> None:
    others = [way(RANKS, 1000.0, 1000.0), way(SHORT, *speeds)]
    found = Recommendation([way(RANKS, 1000.0)], others, twins=ALIKE)
    assert (found.faster, found.pick.candidate) == (None, RANKS)
    assert found.why()[1] == f"bf16 is not chosen: it is {times} times as fast here"


def test_before_a_training_only_real_choices_are_printed() -> None:
    several = Recommendation([way(RANKS, *[1000.0] * 5), way(THREADS, 500.0)], seconds=9.4)
    assert [line.partition(":")[0] for line in several.in_short()] == ["measured 2 combinations in 9.4 s"]
    found = Recommendation([way(RANKS, *[1000.0] * 5)], FASTER, twins=ALIKE)
    assert [line.partition(":")[0] for line in found.in_short()] == ["bf16 is chosen"]


def test_the_table_has_every_way_once_with_a_remark() -> None:
    unfit = Entry(LAST, problem=BadModel("no view of that"))
    first = Entry(replace(LONELY, ranks=4), Timing(1, 64, 0.256), steps=5)
    ways = [
        way(LONELY, 400.0, stopped=True, steps=1),
        unfit,
        way(RANKS, 1000.0, 1100.0, 900.0),
        way(THREADS, steps=0),
        first,
    ]
    found = Recommendation(ways, [way(RANKS, 1000.0), way(SHORT, 500.0, stopped=True)])
    assert shown(found) == [
        "2 1 fp32 contiguous 64 1,000 ± 5% 1.00 pick",
        "2 1 bf16 contiguous 64 500 - 0.50 stopped early, after 9 steps",
        "1 1 fp32 contiguous 64 400 - 0.40 stopped early, after 1 step",
        "4 1 fp32 contiguous 64 250 - 0.25 its first steps: no time for more",
        "2 1 fp32 channels_last 64 - - - does not fit: no view of that",
        "1 2 fp32 contiguous 64 - - - not measured: no time left",
    ]


def test_the_json_record_has_every_measurement() -> None:
    found = Recommendation([way(RANKS, 1000.0, 1100.0), way(THREADS)], seconds=12.5)
    values = json.loads(to_json(found.as_json()))
    assert values["pick"] == {
        "ranks": 2, "threads": 1, "precision": "fp32", "layout": "contiguous", "batch_size": 64
    }  # fmt: skip
    first, second = values["candidates"]
    assert (first["samples_per_s"], first["of_the_pick"]) == (1050.0, 1.0)
    assert first["turns"] == {"1": 1000.0, "2": 1100.0}
    assert (second["samples_per_s"], second["remark"][:12], values["seconds"]) == (None, "not measured", 12.5)
