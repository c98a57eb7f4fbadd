"""Which ranks are named, and when."""

from __future__ import annotations

import pytest

from tests.watching.seen import NOW, beat, seen, summary, usage
from tutti.records.heartbeat import FAILED, FINISHED
from tutti.watching.health import Condition, RankTrouble, examine
from tutti.watching.snapshot import Snapshot

LONG_AGO = NOW - 60.0


def findings(run: Snapshot) -> tuple[RankTrouble, ...]:
    return examine(run).findings


def test_ranks_that_train_are_well() -> None:
    health = examine(seen(beat(0), beat(1), usage=(usage("running", "sleeping"),)))
    assert health.condition is Condition.RUNNING
    assert health.findings == ()
    assert health.well


def test_a_rank_that_is_silent_is_named_and_the_others_are_not() -> None:
    run = seen(beat(0), beat(1, time=NOW - 12.0, step=990), beat(2))
    (found,) = findings(run)
    assert (found.rank, found.lost) == (1, True)
    assert found.what == "has been silent for 12 s, since step 990"
    assert "process 1001 on a" in found.remedy
    assert not examine(run).well


@pytest.mark.parametrize("state", ["stopped", "tracing-stop"])
def test_a_rank_that_somebody_has_stopped_is_named_before_it_is_silent(state: str) -> None:
    (found,) = findings(seen(beat(0), beat(1, time=NOW - 2.0), usage=(usage("running", state),)))
    assert (found.rank, found.lost) == (1, True)
    assert "'kill -CONT 1001'" in found.remedy


def test_a_rank_whose_process_is_gone_is_named_at_once() -> None:
    (found,) = findings(seen(beat(0), beat(1, time=NOW - 2.0), usage=(usage("running", "gone"),)))
    assert (found.rank, found.lost) == (1, True)
    assert found.what.startswith("is gone")


@pytest.mark.parametrize(
    ("other", "sample"),
    [({"state": FAILED, "error": "KeyError: 'x'"}, "running"), ({}, "gone")],
)
def test_a_run_has_failed_soon_after_a_rank_has_ended_though_others_are_left(
    other: dict[str, object], sample: str
) -> None:
    def condition(age_s: float) -> Condition:
        ended = beat(1, time=NOW - age_s, **other)
        return examine(seen(beat(0), ended, usage=(usage("stopped", sample),))).condition

    assert condition(9.0) is Condition.RUNNING
    assert condition(11.0) is Condition.FAILED


def test_a_rank_that_failed_comes_first_with_its_error() -> None:
    silent, failed = beat(0, time=NOW - 20.0), beat(1, state=FAILED, error="KeyError: 'x'")
    first, second = findings(seen(silent, failed, beat(2)))
    assert first.what == "failed: KeyError: 'x'"
    assert (first.rank, second.rank) == (1, 0)


def test_a_rank_that_makes_fewer_steps_is_behind() -> None:
    (found,) = findings(seen(beat(0), beat(1), beat(2, step=850)))
    assert (found.rank, found.lost) == (2, False)
    assert found.what == "is 150 steps behind the others"
    assert examine(seen(beat(0), beat(1), beat(2, step=850))).well


def test_a_rank_at_less_than_half_the_speed_is_slow() -> None:
    (found,) = findings(seen(beat(0), beat(1, samples_per_s=150.0), beat(2)))
    assert (found.rank, found.lost) == (1, False)
    assert found.what == "computes 150 samples/s, the others 320"


def test_ranks_that_live_and_make_no_step_are_stuck() -> None:
    first, second = findings(seen(beat(0, moved=LONG_AGO), beat(1, moved=LONG_AGO)))
    assert (first.rank, second.rank) == (0, 1)
    assert "has made no step for 60 s" in first.what
    assert "py-spy dump --pid 1000" in first.remedy


def test_ranks_that_all_wait_for_each_other_are_all_named() -> None:
    waits = [beat(rank, moved=LONG_AGO, waits="barrier (tutti.strategies.sync:7)") for rank in range(2)]
    assert [(found.rank, found.lost) for found in findings(seen(*waits))] == [(0, True), (1, True)]
    assert findings(seen(*waits))[0].what.endswith(" s, in barrier (tutti.strategies.sync:7)")


def test_ranks_that_wait_for_a_lost_one_are_not_named() -> None:
    run = seen(beat(0, moved=LONG_AGO), beat(1, moved=LONG_AGO, time=LONG_AGO))
    assert [found.rank for found in findings(run)] == [1]


def test_a_run_with_a_summary_has_finished_whatever_its_ranks_say() -> None:
    health = examine(seen(beat(0, time=LONG_AGO), summary=summary(2)))
    assert (health.condition, health.findings) == (Condition.FINISHED, ())


def test_a_run_without_a_summary_and_without_a_live_rank_has_failed() -> None:
    health = examine(seen(beat(0, time=LONG_AGO), beat(1, time=LONG_AGO)))
    assert health.condition is Condition.FAILED
    assert not health.well


def test_a_run_that_was_stopped_has_a_checkpoint_and_no_summary() -> None:
    ranks = beat(0, state=FINISHED), beat(1, state=FINISHED)
    health = examine(seen(*ranks, resumable=True))
    assert (health.condition, health.well) == (Condition.STOPPED, True)
    assert examine(seen(ranks[0], beat(1, time=LONG_AGO), resumable=True)).condition is Condition.FAILED


def test_a_folder_without_records_is_waited_for() -> None:
    assert examine(seen(config=None, written=None)).condition is Condition.WAITING
    assert examine(seen(written=NOW - 2.0)).condition is Condition.WAITING


def test_records_that_nobody_continues_are_those_of_a_run_that_failed() -> None:
    assert examine(seen(written=LONG_AGO)).condition is Condition.FAILED
