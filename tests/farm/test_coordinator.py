"""Tests of the coordinator, on simulated blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.farm.job_list import JobList
from tests.farm.virtual_pool import NEVER, Course, VirtualPool, _summary
from tutti.farm.coordinator import STOP_S, Coordinator, FarmStopping, Happening, JobBegan, JobEnded, JobOver
from tutti.farm.jobs import FarmJob, JobOutcome, blocks_for
from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord
from tutti.run.config import TrainConfig

CONFIG = TrainConfig()
FINISHED, STOPPED, FAILED = JobState.FINISHED, JobState.STOPPED, JobState.FAILED


tried = settings(
    derandomize=True, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass(frozen=True)
class TimedJob(FarmJob):
    """A job that takes some seconds."""

    seconds: float = 0.0


def _jobs(seconds: Sequence[float]) -> list[TimedJob]:
    """Jobs that take so long each, the longest first."""
    jobs = [TimedJob(f"job-{number}", CONFIG, seconds=one) for number, one in enumerate(seconds)]
    return sorted(jobs, key=lambda job: -job.seconds)


def _course(job: FarmJob) -> Course:
    assert isinstance(job, TimedJob)
    return Course(job.seconds)


@tried
@given(
    st.lists(st.floats(0.01, 100), max_size=30),
    st.integers(1, 8),
    st.sets(st.integers(0, 29)),
    st.sets(st.integers(0, 29)),
)
def test_every_job_ends_once(lengths: list[float], blocks: int, failing: set[int], hanging: set[int]) -> None:
    jobs = _jobs(lengths)
    by_name = {job.name: number for number, job in enumerate(jobs)}

    def course(job: FarmJob) -> Course:
        number = by_name[job.name]
        if number in hanging:
            return Course(NEVER)
        return replace(_course(job), fails="killed" if number in failing else "")

    pool, source = VirtualPool(blocks, course), JobList(jobs)
    told: list[Happening] = []
    outcome = Coordinator(pool, source, job_timeout_s=1000, listener=told.append).run()
    assert sorted(name for _, _, name in pool.began) == sorted(by_name)
    for job in jobs:
        number = by_name[job.name]
        expected = FAILED if number in failing | hanging else FINISHED
        assert source.outcomes[job.name].state is expected
        if number in hanging:
            assert "not done after 1000 s" in source.outcomes[job.name].why
            assert source.outcomes[job.name].seconds == pytest.approx(1000)
    assert Counter(one.job.name for one in told if isinstance(one, JobEnded)) == Counter(by_name.keys())
    assert outcome.stopped is None
    assert sum(outcome.ended.values()) == len(jobs)
    assert outcome.busy_s <= blocks * outcome.seconds + 1e-6


@tried
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_the_longest_come_first_and_no_block_idles_while_jobs_wait(lengths: list[float], blocks: int) -> None:
    pool = VirtualPool(blocks, _course)
    outcome = Coordinator(pool, JobList(_jobs(lengths))).run()
    begun = [lengths[int(name.removeprefix("job-"))] for _, _, name in pool.began]
    assert begun == sorted(lengths, reverse=True)
    # Graham's bound for longest first.
    ideal = max(sum(lengths) / blocks, max(lengths))
    assert outcome.seconds <= (4 / 3) * ideal * (1 + 1e-9) + min(lengths)


def test_a_block_that_dies_takes_the_next_job() -> None:
    pool = VirtualPool(1, lambda job: Course(1, "killed" if job.name == "job-0" else ""))
    source = JobList(_jobs([3, 2, 1]))
    Coordinator(pool, source).run()
    states = {name: outcome.state for name, outcome in source.outcomes.items()}
    assert states == {"job-0": FAILED, "job-1": FINISHED, "job-2": FINISHED}
    assert [name for _, _, name in pool.began] == ["job-0", "job-1", "job-2"]


def test_a_request_stops_running_jobs_and_begins_no_other() -> None:
    courses = {"job-0": Course(50, stops_s=2), "job-1": Course(5000, stops_s=NEVER), "job-2": Course(5)}
    pool, source = VirtualPool(2, lambda job: courses[job.name], stops_at=10), JobList(_jobs([3, 2, 1]))
    told: list[Happening] = []
    outcome = Coordinator(pool, source, listener=told.append).run()
    assert outcome.stopped == "it was asked to"
    assert [one.why for one in told if isinstance(one, FarmStopping)] == ["it was asked to"]
    assert [one.job.name for one in told if isinstance(one, JobBegan)] == ["job-0", "job-1"]
    assert {name: one.state for name, one in source.outcomes.items()} == {"job-0": STOPPED, "job-1": STOPPED}
    assert source.outcomes["job-0"].seconds == pytest.approx(12)
    # It does not stop by itself.
    assert source.outcomes["job-1"].seconds == pytest.approx(10 + STOP_S)


def test_the_time_limit_stops_the_farm() -> None:
    pool, source = VirtualPool(2, lambda job: Course(8, stops_s=1)), JobList(_jobs([1] * 10))
    outcome = Coordinator(pool, source, time_limit_s=20).run()
    assert outcome.stopped == "its time limit is over"
    assert outcome.ended == Counter({FINISHED: 4, STOPPED: 2})
    assert outcome.seconds == pytest.approx(21)


class Pairs:
    """A source that gives two jobs, and two more only when it has heard of both."""

    def __init__(self, pairs: int) -> None:
        self._ready, self._out, self._left = deque[int]([0, 0]), 0, pairs - 1
        self.given = 0

    def next(self) -> FarmJob | None:
        """Return a job if one is ready."""
        if not self._ready:
            return None
        self._ready.popleft()
        self._out, self.given = self._out + 1, self.given + 1
        return TimedJob(f"pair-{self.given}", CONFIG, seconds=self.given)

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Go on."""
        return False

    def ended(self, job: FarmJob, outcome: JobOutcome) -> None:
        """Make the next two ready after both."""
        self._out -= 1
        if not self._out and not self._ready and self._left:
            self._left -= 1
            self._ready.extend([0, 0])


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_source_may_wait_for_results(blocks: int) -> None:
    source = Pairs(4)
    outcome = Coordinator(VirtualPool(blocks, _course), source).run()
    assert outcome.ended[FINISHED] == source.given == 8


@tried
@given(st.integers(1, 500), st.integers(1, 64))
def test_the_number_of_blocks_is_the_least_with_as_few_waves(jobs: int, most: int) -> None:
    found = blocks_for(jobs, most)
    assert found <= most
    waves = -(-jobs // most)
    assert -(-jobs // found) == waves
    assert found == 1 or -(-jobs // (found - 1)) > waves


def test_a_job_that_is_done_at_the_moment_of_its_time_out_is_done() -> None:
    class LastWords(VirtualPool):
        def restart(self, block: int) -> JobOver | None:
            super().restart(block)
            return JobOver(block, _summary(5))

    source = JobList(_jobs([1]))
    Coordinator(LastWords(1, lambda job: Course(NEVER)), source, job_timeout_s=5).run()
    assert source.outcomes["job-0"].state is FINISHED
