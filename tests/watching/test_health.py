"""Which ranks are named, and when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.watching.seen import NOW, beat, epoch, seen, summary, usage
from tutti.records.heartbeat import FAILED, FINISHED, STARTING, VALIDATING, WAITING
from tutti.records.run import EpochRecord, RankRecord, RunStart, World
from tutti.watching.health import Condition, Limits, RankTrouble, examine
from tutti.watching.snapshot import Snapshot

LIMITS = Limits(silent_s=10.0, behind=100)
LONG_AGO = NOW - 60.0


def findings(run: Snapshot) -> tuple[RankTrouble, ...]:
    return examine(run, LIMITS).findings


def test_ranks_that_train_are_well() -> None:
    health = examine(seen(beat(0), beat(1), usage=(usage("running", "sleeping"),)), LIMITS)
    assert health.condition is Condition.RUNNING
    assert health.findings == ()
    assert health.unseen == ()
    assert health.well


def test_a_rank_that_is_silent_is_named_and_the_others_are_not() -> None:
    run = seen(beat(0), beat(1, time=NOW - 12.0, step=990), beat(2))
    (found,) = findings(run)
    assert (found.rank, found.lost) == (1, True)
    assert found.what == "has been silent for 12 s, since step 990"
    assert "process 1001 on a" in found.remedy
    assert not examine(run, LIMITS).well


def test_a_rank_is_silent_only_after_the_limit() -> None:
    assert findings(seen(beat(0), beat(1, time=NOW - 9.0))) == ()
    assert examine(seen(beat(0), beat(1, time=NOW - 9.0)), Limits(silent_s=8.0)).findings[0].rank == 1


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
        return examine(seen(beat(0), ended, usage=(usage("stopped", sample),)), LIMITS).condition

    assert condition(9.0) is Condition.RUNNING
    assert condition(11.0) is Condition.FAILED


def test_an_old_sample_says_nothing_about_now() -> None:
    assert findings(seen(beat(0), beat(1), usage=(usage("running", "stopped", age=30.0),))) == ()


def test_a_rank_that_failed_comes_first_with_its_error() -> None:
    silent, failed = beat(0, time=NOW - 20.0), beat(1, state=FAILED, error="KeyError: 'x'")
    first, second = findings(seen(silent, failed, beat(2)))
    assert first.what == "failed: KeyError: 'x'"
    assert (first.rank, second.rank) == (1, 0)


def test_a_rank_that_ended_with_a_lost_one_comes_last_and_is_not_said_to_have_a_traceback() -> None:
    ended = beat(0, state=FAILED, error="PeerLost: lost rank 1: its process ended")
    first, second = findings(seen(ended, beat(1), usage=(usage("gone", "gone"),)))
    assert (first.rank, first.what) == (1, "is gone since step 1,000")
    assert (second.rank, second.remedy) == (0, "what the run printed last says why")


def test_a_rank_that_makes_fewer_steps_is_behind() -> None:
    (found,) = findings(seen(beat(0), beat(1), beat(2, step=850)))
    assert (found.rank, found.lost) == (2, False)
    assert found.what == "is 150 steps behind the others"
    assert examine(seen(beat(0), beat(1), beat(2, step=850)), LIMITS).well


def test_steps_are_compared_at_one_time() -> None:
    earlier = beat(1, time=NOW - 5.0, step=880, steps_per_s=30.0)
    assert findings(seen(beat(0, steps_per_s=30.0), earlier, beat(2, steps_per_s=30.0))) == ()


def test_a_lead_of_less_than_some_seconds_is_chance() -> None:
    fast = [beat(rank, steps_per_s=1000.0) for rank in (0, 1)]
    assert findings(seen(*fast, beat(2, step=100_000 - 99_500, steps_per_s=1000.0))) == ()


def test_a_rank_that_waits_for_the_others_is_not_behind_and_tells_who_is() -> None:
    waits = beat(0, state=WAITING, moved=LONG_AGO)
    (found,) = findings(seen(waits, beat(1, step=700)))
    assert found.rank == 1


def test_a_rank_at_less_than_half_the_speed_is_slow() -> None:
    (found,) = findings(seen(beat(0), beat(1, samples_per_s=150.0), beat(2)))
    assert (found.rank, found.lost) == (1, False)
    assert found.what == "computes 150 samples/s, the others 320"


def test_one_rank_is_never_behind() -> None:
    assert findings(seen(beat(0, samples_per_s=0.001))) == ()


def test_ranks_that_live_and_make_no_step_are_stuck() -> None:
    first, second = findings(seen(beat(0, moved=LONG_AGO), beat(1, moved=LONG_AGO)))
    assert (first.rank, second.rank) == (0, 1)
    assert "has made no step for 60 s" in first.what
    assert "py-spy dump --pid 1000" in first.remedy


def test_of_ranks_that_make_no_step_those_that_wait_for_it_are_not_to_blame() -> None:
    run = seen(
        beat(0, moved=LONG_AGO, waits="barrier (tutti.strategies.sync:7)"),
        beat(1, moved=LONG_AGO),
        beat(2, moved=LONG_AGO, waits="barrier (tutti.strategies.sync:7)"),
    )
    (found,) = findings(run)
    assert (found.rank, found.lost) == (1, True)
    assert not examine(run, LIMITS).well


def test_ranks_that_all_wait_for_each_other_are_all_named() -> None:
    waits = [beat(rank, moved=LONG_AGO, waits="barrier (tutti.strategies.sync:7)") for rank in range(2)]
    assert [(found.rank, found.lost) for found in findings(seen(*waits))] == [(0, True), (1, True)]
    assert findings(seen(*waits))[0].what.endswith(" s, in barrier (tutti.strategies.sync:7)")


def test_a_first_step_that_takes_long_does_not_lose_the_run() -> None:
    run = seen(
        beat(0, moved=LONG_AGO, steps_per_s=0.0),
        beat(1, moved=LONG_AGO, steps_per_s=0.0, waits="barrier (tutti.strategies.sync:7)"),
    )
    (found,) = findings(run)
    assert (found.rank, found.lost) == (0, False)
    assert examine(run, LIMITS).well


@pytest.mark.parametrize(("state", "what"), [("stopped", "is stopped"), ("gone", "is gone")])
def test_a_server_is_named_by_what_its_host_sees(state: str, what: str) -> None:
    waits = [beat(rank, moved=LONG_AGO, waits="barrier (tutti.strategies.sync:7)") for rank in range(2)]
    run = seen(*waits, usage=(usage("sleeping", "sleeping", "sleeping", state),))
    (found,) = findings(run)
    assert (found.rank, found.lost) == (3, True)
    assert found.what == f"(server 1, on a) {what}"
    assert not examine(run, LIMITS).well


def test_a_rank_whose_process_is_not_there_any_more_is_named_before_it_is_silent() -> None:
    (found,) = findings(seen(beat(0), beat(1, time=NOW - 3.0), ended=frozenset({1})))
    assert (found.rank, found.lost) == (1, True)
    assert found.what.startswith("is gone")


def test_a_run_whose_processes_are_not_there_any_more_has_failed_at_once() -> None:
    beats = [beat(rank, time=NOW - 3.0) for rank in range(2)]
    samples = (usage("running", "running", age=3.0),)
    assert examine(seen(*beats, usage=samples), LIMITS).condition is Condition.RUNNING
    run = seen(*beats, usage=samples, ended=frozenset({0, 1}))
    assert examine(run, LIMITS).condition is Condition.FAILED


def test_ranks_that_wait_for_a_lost_one_are_not_named() -> None:
    run = seen(beat(0, moved=LONG_AGO), beat(1, moved=LONG_AGO, time=LONG_AGO))
    assert [found.rank for found in findings(run)] == [1]


def test_long_steps_are_no_reason_to_worry() -> None:
    slow = {"steps_per_s": 0.1, "moved": NOW - 30.0}
    assert findings(seen(beat(0, **slow), beat(1, **slow))) == ()


@pytest.mark.parametrize("state", [VALIDATING, WAITING, STARTING])
def test_a_rank_that_does_something_else_than_train_may_take_its_time(state: str) -> None:
    assert findings(seen(beat(0, state=state, moved=LONG_AGO), beat(1, state=state, moved=LONG_AGO))) == ()


def test_ranks_that_leave_no_sign_here_are_told_apart_from_lost_ones() -> None:
    run = seen(beat(0), beat(2), config={"workers": "4"})
    health = examine(run, LIMITS)
    assert health.unseen == (1, 3)
    assert health.well


@pytest.mark.parametrize(
    ("beats", "age_s", "unseen"),
    [((), 1.0, ()), ((), 60.0, ()), ((0,), 1.0, ()), ((0, 2), 60.0, (1, 3)), ((0, 1, 2, 3), 60.0, ())],
)
def test_ranks_that_have_only_just_taken_over_are_not_missed(
    beats: tuple[int, ...], age_s: float, unseen: tuple[int, ...]
) -> None:
    start = RunStart(datetime.fromtimestamp(NOW - age_s, UTC).isoformat(), World(4), 629)
    run = seen(*map(beat, beats), config={"workers": "4"}, usage=(usage("running"),), starts=(start,))
    assert (examine(run, LIMITS).condition, examine(run, LIMITS).unseen) == (Condition.RUNNING, unseen)


def test_a_run_with_a_summary_has_finished_whatever_its_ranks_say() -> None:
    health = examine(seen(beat(0, time=LONG_AGO), summary=summary(2)), LIMITS)
    assert (health.condition, health.findings) == (Condition.FINISHED, ())


def test_a_run_without_a_summary_and_without_a_live_rank_has_failed() -> None:
    health = examine(seen(beat(0, time=LONG_AGO), beat(1, time=LONG_AGO)), LIMITS)
    assert health.condition is Condition.FAILED
    assert not health.well


def test_a_run_whose_ranks_all_say_that_they_failed_has_failed_at_once() -> None:
    run = seen(beat(0, state=FAILED, error="a"), beat(1, state=FAILED, error="b"))
    assert examine(run, LIMITS).condition is Condition.FAILED


def test_ranks_that_finished_without_a_summary_have_failed_to_write_it() -> None:
    assert examine(seen(beat(0, state=FINISHED)), LIMITS).condition is Condition.FAILED


def test_a_run_that_was_stopped_has_a_checkpoint_and_no_summary() -> None:
    ranks = beat(0, state=FINISHED), beat(1, state=FINISHED)
    health = examine(seen(*ranks, resumable=True), LIMITS)
    assert (health.condition, health.well) == (Condition.STOPPED, True)
    assert (
        examine(seen(ranks[0], beat(1, time=LONG_AGO), resumable=True), LIMITS).condition is Condition.FAILED
    )


def test_a_run_whose_ranks_are_all_stopped_has_not_failed() -> None:
    run = seen(beat(0, time=LONG_AGO), beat(1, time=LONG_AGO), usage=(usage("stopped", "stopped"),))
    health = examine(run, LIMITS)
    assert health.condition is Condition.RUNNING
    assert [found.rank for found in health.findings] == [0, 1]


def test_a_folder_without_records_is_waited_for() -> None:
    assert examine(seen(config=None, written=None), LIMITS).condition is Condition.WAITING
    assert examine(seen(written=NOW - 2.0), LIMITS).condition is Condition.WAITING


def test_records_that_nobody_continues_are_those_of_a_run_that_failed() -> None:
    assert examine(seen(written=LONG_AGO), LIMITS).condition is Condition.FAILED


def waiting(*shares: float) -> EpochRecord:
    """An epoch in which each rank waited for such a share of its time."""
    ranks = [RankRecord(stages={"forward": 1 - share, "wait": share}) for share in shares]
    return replace(epoch(1), ranks=ranks)


def test_the_rank_that_the_others_wait_for_in_lock_step_is_named() -> None:
    (found,) = findings(seen(beat(0), beat(1), beat(2), history=(waiting(0.5, 0.05, 0.4),)))
    assert (found.rank, found.lost) == (1, False)
    assert found.what == "was waited for by the others, 40% of epoch 1 at least"


@pytest.mark.parametrize("shares", [(0.5, 0.4), (0.2, 0.0), (0.9,), ()])
def test_ranks_that_all_wait_or_hardly_wait_are_nobodys_fault(shares: tuple[float, ...]) -> None:
    assert findings(seen(beat(0), beat(1), history=(waiting(*shares),))) == ()
