"""Cores and memory of a run: what is measured, and that the process which measures leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import tutti
from tests.launch.processes import PATIENCE_S, wait_until_gone
from tutti.comm.shm.communicator import HostCommunicator
from tutti.launch.usage_sampler import Probe, Sampler, sampling
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


@pytest.mark.serial
def test_a_rank_that_computes_is_seen_to_compute(busy: subprocess.Popen[bytes]) -> None:
    probe = Probe({0: busy.pid}, CORES)
    probe.sample()
    began = time.monotonic()
    has_computed(busy, 0.3)
    record = probe.sample()
    passed = time.monotonic() - began
    (rank,) = record.ranks
    assert rank.rank == 0
    assert 0.5 * 30 / passed <= rank.cpu <= 150
    assert len(record.cores) == len(CORES)
    assert sum(record.cores) >= 0.5 * 30 / passed
    assert all(0 <= percent <= 100 for percent in record.cores)


def test_memory_is_the_proportional_set_size(busy: subprocess.Popen[bytes]) -> None:
    (rank,) = Probe({3: busy.pid}, CORES).sample().ranks
    assert rank.rank == 3
    assert rank.pss is not None
    assert 64 << 20 <= rank.pss <= 160 << 20


def test_a_stopped_rank_is_seen_to_be_stopped(busy: subprocess.Popen[bytes]) -> None:
    probe = Probe({0: busy.pid}, CORES)
    busy.send_signal(signal.SIGSTOP)
    in_state(busy, psutil.STATUS_STOPPED)
    assert probe.sample().ranks[0].state == "stopped"


def test_a_rank_that_ended_is_gone_before_and_after_somebody_asked_for_it(
    busy: subprocess.Popen[bytes],
) -> None:
    probe = Probe({0: busy.pid}, CORES)
    busy.kill()
    in_state(busy, psutil.STATUS_ZOMBIE)
    assert probe.sample().ranks[0].state == "gone"
    busy.wait()
    record = probe.sample()
    assert record.ranks[0].state == "gone"


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = Sampler({0: os.getpid()}, CORES)
    sampler.begin(tmp_path / "missing" / "usage.jsonl")
    sampler._process.wait(PATIENCE_S)
    sampler.end()
    said = capfd.readouterr().err
    assert said.count("tutti: warning: cannot write") == 1
    assert "Traceback" not in said


def test_the_sampler_is_there_for_a_block_and_not_after_it(tmp_path: Path) -> None:
    with sampling(HostCommunicator.alone(), wanted=True) as sampler:
        assert sampler is not None
        sampler.begin(RunFolder(tmp_path).usage_file())
    assert sampler._process.returncode == 0
    (rank,) = RunFolder(tmp_path).usage().records[-1].ranks
    assert rank.rank == 0


def test_a_run_that_is_soon_over_tells_the_memory_of_each_rank(tmp_path: Path) -> None:
    tutti.train("mlp", "digits", workers=2, epochs=1, out=str(tmp_path / "run"))
    ranks = RunFolder(tmp_path / "run").usage().records[-1].ranks
    assert all(one.pss is not None for one in ranks)
    assert [one.rank for one in ranks] == [0, 1]


def test_a_sampler_does_not_outlive_a_rank_that_is_killed(tmp_path: Path) -> None:
    # The forked process has the other end of the sampler's pipe too, and lives on.
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from tutti.launch.usage_sampler import Sampler\n"
        "sampler = Sampler({0: os.getpid()}, sorted(os.sched_getaffinity(0)))\n"
        "sampler.begin(Path(sys.argv[1])); path = Path(sys.argv[1]); forked = os.fork()\n"
        "if not forked: os.close(1); os.close(2); time.sleep(1000)\n"
        "while not path.exists(): time.sleep(0.01)\n"
        "print(sampler._process.pid, forked, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", program, str(RunFolder(tmp_path).usage_file())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    done = subprocess.run(words, **pipes, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    sampler, forked = map(int, done.stdout.split())
    try:
        assert wait_until_gone([sampler]) == []
    finally:
        for process in (forked, sampler):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
