"""The condition of a run, and the ranks in trouble."""

from __future__ import annotations

import pytest

from tests.watching.seen import NOW, beat, seen, summary, usage
from tutti.records.heartbeat import FAILED, FINISHED
from tutti.watching.health import Condition, RankTrouble, examine
from tutti.watching.snapshot import Snapshot

LONG_AGO = NOW - 60.0


def findings(run: Snapshot) -> tuple[RankTrouble, ...]:
    return examine(run).findings


def test_ranks_that_train_have_no_trouble() -> None:
    health = examine(seen(beat(0), beat(1), usage=(usage("running", "sleeping"),)))
    assert health.condition is Condition.RUNNING
    assert health.findings == ()
    assert health.well


def test_only_the_silent_rank_is_named() -> None:
    run = seen(beat(0), beat(1, time=NOW - 12.0, step=990), beat(2))
    (found,) = findings(run)
    assert (found.rank, found.lost) == (1, True)
    assert found.what == "has been silent for 12 s, since step 990"
    assert "process 1001 on a" in found.remedy
    assert not examine(run).well


@pytest.mark.parametrize(
    ("state", "text"),
    [("stopped", "'kill -CONT 1001'"), ("tracing-stop", "'kill -CONT 1001'"), ("gone", "1 is gone since")],
)
def test_a_stopped_or_missing_process_is_named_before_it_is_silent(state: str, text: str) -> None:
    (found,) = findings(seen(beat(0), beat(1, time=NOW - 2.0), usage=(usage("running", state),)))
    assert (found.rank, found.lost) == (1, True)
    assert text in str(found)


def test_a_rank_that_another_one_has_lost_is_gone_unless_it_was_seen_since() -> None:
    failed = beat(0, state=FAILED, error="PeerLost: lost ranks 1, 2: its process has ended")
    killed, failed_itself = beat(1, time=NOW - 1.0), beat(2, time=NOW - 1.0, state=FAILED, error="KeyError")
    found = findings(seen(failed, killed, failed_itself, beat(3)))
    assert [(one.rank, one.state) for one in found] == [(2, ""), (1, "gone"), (0, "")]
    assert [one.rank for one in findings(seen(failed, beat(1, time=NOW - 0.1)))] == [0]


@pytest.mark.parametrize(
    ("other", "sample"),
    [({"state": FAILED, "error": "KeyError: 'x'"}, "running"), ({}, "gone")],
)
def test_a_run_has_failed_soon_after_a_rank_has_ended_even_if_others_live(
    other: dict[str, object], sample: str
) -> None:
    def condition(age_s: float) -> Condition:
        ended = beat(1, time=NOW - age_s, **other)
        return examine(seen(beat(0), ended, usage=(usage("stopped", sample),))).condition

    assert condition(9.0) is Condition.RUNNING
    assert condition(11.0) is Condition.FAILED


def test_a_failed_rank_comes_first_with_its_error() -> None:
    silent, failed = beat(0, time=NOW - 20.0), beat(1, state=FAILED, error="KeyError: 'x'")
    first, second = findings(seen(silent, failed, beat(2)))
    assert first.what == "failed: KeyError: 'x'"
    assert (first.rank, second.rank) == (1, 0)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"step": 850}, "is 150 steps behind the others"),
        ({"samples_per_s": 150.0}, "computes 150 samples/s, the others 320"),
    ],
)
def test_a_rank_that_is_behind_or_slow_is_named_but_not_lost(changed: dict[str, object], what: str) -> None:
    health = examine(seen(beat(0), beat(1), beat(2, **changed)))
    (found,) = health.findings
    assert (found.rank, found.lost, found.what) == (2, False, what)
    assert health.well


def test_live_ranks_without_steps_are_stuck() -> None:
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


DEAD = beat(1, time=LONG_AGO)
DONE = beat(0, state=FINISHED), beat(1, state=FINISHED)


@pytest.mark.parametrize(
    ("run", "condition"),
    [
        (seen(DEAD, summary=summary(2)), Condition.FINISHED),
        (seen(beat(0, time=LONG_AGO), DEAD), Condition.FAILED),
        (seen(*DONE, resumable=True), Condition.STOPPED),
        (seen(DONE[0], DEAD, resumable=True), Condition.FAILED),
        (seen(config=None, written=None), Condition.WAITING),
        (seen(written=NOW - 2.0), Condition.WAITING),
        (seen(written=LONG_AGO), Condition.FAILED),
    ],
)
def test_the_condition_depends_on_summary_checkpoints_and_live_ranks(
    run: Snapshot, condition: Condition
) -> None:
    health = examine(run)
    assert health.condition is condition
    assert health.well is (condition is not Condition.FAILED)
