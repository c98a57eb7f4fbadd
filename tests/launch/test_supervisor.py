"""Ranks under our supervisor: results come back, failures end everything, and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import (
    left_in_shared_memory,
    lives,
    shared_memory_files,
    wait_for_files,
    wait_until_gone,
)
from tests.preloaded import interpreter
from tutti.errors import BadData, PeerLost, RankFailed
from tutti.launch.placement import Placement, place_ranks
from tutti.launch.start import start

LIMIT_S = 20.0
"""How long ends may take, beside other tests; nothing that waits for a time-out ends so soon."""

SUPERVISED = Path(__file__).with_name("supervised.py")


@pytest.fixture(autouse=True)
def _nothing_new_in_shared_memory() -> Iterator[None]:
    before = shared_memory_files()
    yield
    assert left_in_shared_memory(before) == set()


def test_each_rank_knows_its_place_and_the_result_of_rank_0_comes_back() -> None:
    placement = place_ranks(2)
    payload = os.urandom(300_000)
    said: list[str] = []
    ranks = start("tests.launch.entries:describe", payload, placement, announce=said.append)
    assert isinstance(ranks, list)
    assert said == [placement.describe(), *(f"warning: {text}" for text in placement.warnings)]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert len({one["pid"] for one in ranks} | {os.getpid()}) == 3
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    for rank, one in enumerate(ranks):
        assert one["payload"] == payload
        assert (one["size"], one["nested"], one["joined"], one["launcher"]) == (2, 2, True, "TUTTI")
        assert (one["threads"], one["OMP_NUM_THREADS"]) == (placement.threads, str(placement.threads))
        assert tuple(one["cores"]) == (placement.cores[rank] if placement.cores else allowed)
    assert wait_until_gone(one["pid"] for one in ranks) == []


def test_a_user_error_stays_what_it_is() -> None:
    with pytest.raises(BadData, match=r"^the labels are 12, expected 0 to 9; check the file$"):
        start("tests.launch.entries:bad_data", b"", place_ranks(2))


@pytest.mark.parametrize(
    ("how", "why"),
    [("kill", r"killed by signal 9 \(SIGKILL\)"), ("exit", "exited with code 3 before it was done")],
)
def test_a_rank_that_dies_is_named(how: str, why: str) -> None:
    with pytest.raises(PeerLost, match=why) as caught:
        start("tests.launch.entries:die", how.encode(), place_ranks(2))
    assert caught.value.ranks == [1]


@pytest.mark.parametrize("how", ["raise", "return"])
def test_a_process_that_a_rank_forks_does_not_end_the_rank(how: str) -> None:
    assert start("tests.launch.entries:fork_here", how.encode(), place_ranks(2)) == 0


def test_an_exception_in_one_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        start("tests.launch.entries:fail", str(tmp_path).encode(), place_ranks(3))
    assert time.monotonic() - float((tmp_path / "when").read_text()) < LIMIT_S
    assert caught.value.rank == 1
    lines = caught.value.traceback.rstrip().splitlines()
    assert lines[-1] == "ValueError: seven is not a colour"
    assert "in fail" in lines[1], "the first frame is the entry's"
    assert not any(lives(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(3))


def test_signals_to_the_supervisor_leave_no_rank_behind(tmp_path: Path) -> None:
    """Three supervisors at the same time, since most of the time goes into starting the ranks."""
    expected = {
        signal.SIGINT: -signal.SIGINT,
        signal.SIGTERM: 128 + signal.SIGTERM,
        signal.SIGKILL: -signal.SIGKILL,
    }
    folders = {signum: tmp_path / signum.name for signum in expected}
    for folder in folders.values():
        folder.mkdir()
    # That it is a user's own matters most where it can do nothing any more.
    supervisors = {
        signum: _supervise(folder, forked=signum != signal.SIGKILL) for signum, folder in folders.items()
    }
    children: list[int] = []
    try:
        wait_for_files(folder / f"rank-{rank}" for folder in folders.values() for rank in range(2))
        for signum, supervisor in supervisors.items():
            notes = [json.loads((folders[signum] / f"rank-{rank}").read_text()) for rank in range(2)]
            children += [note["child"] for note in notes]
            sent = time.monotonic()
            supervisor.send_signal(signum)
            assert supervisor.wait(timeout=60) == expected[signum]
            assert wait_until_gone(note[who] for note in notes for who in ("rank", "child")) == []
            assert time.monotonic() - sent < 2 * LIMIT_S
            said = (folders[signum] / "stderr").read_text()
            assert ("KeyboardInterrupt" in said) == (signum == signal.SIGINT)
            assert said.count("Traceback") <= 1, "the ranks keep silent"
    finally:
        for supervisor in supervisors.values():
            supervisor.kill()
            supervisor.wait()
        for child in filter(lives, children):
            os.kill(child, signal.SIGKILL)


def _supervise(folder: Path, forked: bool) -> subprocess.Popen[bytes]:
    python = interpreter(starts_ranks=True) if forked else [sys.executable]
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen([*python, SUPERVISED, folder], stderr=stderr)


def test_what_ranks_have_left_open_is_written_to_its_end(tmp_path: Path) -> None:
    start("tests.launch.entries:leave_files_open", str(tmp_path).encode(), place_ranks(2))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    written = {"text": "a text", "bytes": "something", "freed": "now", "atexit": "called"}
    assert found == {f"{name}-{rank}": text for name, text in written.items() for rank in range(2)}


@pytest.mark.parametrize("file", ["", "/dev/full"])
def test_a_rank_that_fails_after_its_work_fails_the_job(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerLost, match=f"rank 1: exited with code {1 if file else 5} after it was done"):
        start("tests.launch.entries:fail_at_the_end", file.encode(), place_ranks(2))
    said = "tutti: error: cannot write /dev/full: No space left on device"
    assert (said in capfd.readouterr().err) == bool(file)


def test_one_worker_runs_in_this_process_and_leaves_it_as_it_was() -> None:
    import torch

    before = torch.get_num_threads()
    ranks = start("tests.launch.entries:describe_alone", b"x", Placement(1, before + 1))
    assert ranks == (os.getpid(), before + 1, 1)
    assert torch.get_num_threads() == before
