"""Cores and memory of a run: what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tutti
from tests.launch.processes import PATIENCE_S
from tutti.launch.usage_sampler import Probe, Sampler
from tutti.records.run_folder import RunFolder

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes, with 64 MiB of its own."""
    program = "memory = bytes(1) * (64 << 20); print(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def has_computed(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when the process has used so much CPU time more."""
    seen = psutil.Process(process.pid)
    before, deadline = sum(seen.cpu_times()[:2]), time.monotonic() + PATIENCE_S
    while sum(seen.cpu_times()[:2]) < before + seconds:
        assert time.monotonic() < deadline


def in_state(process: subprocess.Popen[bytes], state: str) -> None:
    """Return when the process is in this state."""
    seen, deadline = psutil.Process(process.pid), time.monotonic() + PATIENCE_S
    while seen.status() != state:
        assert time.monotonic() < deadline


def test_a_rank_that_computes_is_seen_to_compute(busy: subprocess.Popen[bytes]) -> None:
    probe = Probe({0: busy.pid}, CORES)
    probe.sample()
    has_computed(busy, 0.3)
    record = probe.sample()
    assert 0 < record.ranks[0].cpu <= 150
    assert len(record.cores) == len(CORES)
    assert 0 < sum(record.cores) <= 100 * len(CORES)


def test_memory_is_the_proportional_set_size(busy: subprocess.Popen[bytes]) -> None:
    (rank,) = Probe({3: busy.pid}, CORES).sample().ranks
    assert rank.rank == 3
    assert rank.pss is not None
    assert 64 << 20 <= rank.pss <= 160 << 20


def test_an_ended_rank_is_gone_before_and_after_it_is_reaped(busy: subprocess.Popen[bytes]) -> None:
    probe = Probe({0: busy.pid}, CORES)
    busy.kill()
    in_state(busy, psutil.STATUS_ZOMBIE)
    assert probe.sample().ranks[0].state == "gone"
    busy.wait()
    record = probe.sample()
    assert record.ranks[0].state == "gone"


def test_a_file_that_cannot_be_written_gives_one_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = Sampler({0: os.getpid()}, CORES)
    sampler.begin(tmp_path / "missing" / "usage.jsonl")
    sampler.end()
    assert capfd.readouterr().err.count("tutti: warning: cannot write") == 1


def test_a_run_that_is_soon_over_tells_the_memory_of_each_rank(tmp_path: Path) -> None:
    tutti.train("mlp", "digits", workers=2, epochs=1, out=str(tmp_path / "run"))
    ranks = RunFolder(tmp_path / "run").usage().records[-1].ranks
    assert all(one.pss is not None for one in ranks)
    assert [one.rank for one in ranks] == [0, 1]
