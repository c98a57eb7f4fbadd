"""Tests of several launches on one farm."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import load_file

from tests.farm.job_list import JobList
from tests.farm.launch import JOBS, LONG, work
from tests.preloaded import interpreter
from tutti.farm.claims import Unclaimed
from tutti.farm.coordinator import Happening, JobFound
from tutti.farm.jobs import FarmJob
from tutti.records.checkpoints import present
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.run_folder import ERROR, RunFolder
from tutti.run.config import TrainConfig
from tutti.watching.farm import read_progress


def _start(stack: ExitStack, farm: Path, *words: str) -> subprocess.Popen[str]:
    """Start a launch of its own; it is gone with the context."""
    program = subprocess.Popen(
        [*interpreter(starts_ranks=True), str(Path(__file__).with_name("launch.py")), str(farm), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(program)
    stack.callback(program.kill)
    return program


def _line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def _go_on(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    if not program.stdin.closed:
        program.stdin.write("\n")
        program.stdin.close()


def test_three_launches_train_each_job_once_and_one_that_is_killed_leaves_its_job_to_them(
    tmp_path: Path,
) -> None:
    farm = tmp_path / "farm"
    with ExitStack() as stack:
        killed = _start(stack, farm, "waits")
        assert _line(killed) == LONG
        _go_on(killed)
        assert _line(killed) == "waits"
        second = _start(stack, farm)
        # The longest job is the first of all, and taken.
        assert _line(second) == "short/0"
        while not present(farm / "jobs" / LONG / "checkpoints"):
            time.sleep(0.01)
        assert FarmFolder.open(farm).worked_on
        assert read_progress(FarmFolder.open(farm)).rows[0].job == LONG
        killed.kill()
        ours = work(farm, JobList(JOBS), lambda job: _go_on(second))
        assert second.stdout is not None
        said = second.stdout.read()
    folder = FarmFolder.open(farm)
    assert not folder.worked_on
    assert json.loads(said.splitlines()[-1]) == ours
    assert ours == work(tmp_path / "alone", JobList(JOBS), str)
    farms = farm, tmp_path / "alone"
    for job in JOBS:
        one, other = (load_file(path / "jobs" / job.name / "weights.safetensors") for path in farms)
        assert all((one[name] == other[name]).all() for name in other)
    events = folder.events().records
    assert Counter(one.job for one in events if one.event == "began") == Counter(
        {job.name: 2 if job.name == LONG else 1 for job in JOBS}
    )
    assert len({one.launch for one in events}) == 3
    # It went on from its checkpoint.
    assert len((folder.job(LONG) / "starts.jsonl").read_text().splitlines()) == 2
    progress = read_progress(folder)
    assert (set(progress.done.values()), len(progress.done), progress.rows) == ({JobState.FINISHED}, 12, {})


def test_results_of_other_launches_are_reported_and_their_jobs_left_alone(tmp_path: Path) -> None:
    folder = FarmFolder.begin(tmp_path / "farm", "test", {})
    jobs = [FarmJob(name, TrainConfig()) for name in ("failed", "running", "free")]
    told: list[Happening] = []
    RunFolder(folder.job("failed")).write_error("before\nValueError: of an earlier try\n")
    os.utime(folder.job("failed") / ERROR, (1, 1))
    with folder.launch() as ours, folder.launch() as other:
        assert other.claim("failed")
        assert other.claim("running")
        source = JobList(jobs)
        left = Unclaimed(folder, ours, source, told.append)
        assert left.next() == jobs[2]
        assert left.next() is None
        assert left.elsewhere()
        RunFolder(folder.job("failed")).write_error("now\nValueError: no")
        left._look_at = 0.0
        assert left.next() is None
        assert [one.job.name for one in told if isinstance(one, JobFound)] == ["failed"]
        assert source.outcomes["failed"].why == "ValueError: no"
        other.release("running")
        left._look_at = 0.0
        assert left.next() == jobs[1]
        assert not left.elsewhere()
    # A later launch tries again what has failed; a file has the time of the kernel's last tick.
    os.utime(folder.job("failed") / ERROR, (1, 1))
    with folder.launch() as later:
        assert Unclaimed(folder, later, JobList(jobs), told.append).next() == jobs[0]
