"""Ranks on hosts, started by mpirun: by ours (`--hosts`), or by one that the user typed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.processes import lives, wait_for_files, wait_until_gone
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import forked_mpi_ranks, interpreter
from tutti.errors import LauncherLost, PeerLost, RankFailed, TuttiError, UserError
from tutti.launch import mpirun, ranks_on_hosts
from tutti.launch.mpi_rank import START
from tutti.launch.mpirun import Mpirun, command_line, find_mpirun, settings
from tutti.launch.placement import Host, place_ranks
from tutti.launch.rank_connections import LauncherAddress
from tutti.launch.ranks_on_hosts import End, RanksOnHosts
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import StopRequests

HERE = Path(__file__).parent
LIMIT_S = 20.0
WHEEL = Mpirun("/venv/bin/mpirun", own=True, open_mpi=True)


def test_the_command_names_hosts_ranks_and_what_reaches_every_host() -> None:
    line = command_line(WHEEL, (Host("a", 4), Host("b", 2)), ["TUTTI_JOB"], ["--display", "map"])
    text = " ".join(line)
    assert text.startswith("/venv/bin/mpirun --host a:4,b:2 -n 6")
    assert "-x TUTTI_JOB" in text
    assert text.endswith(f"--display map {sys.executable} -P -m tutti.launch.mpi_rank")
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)


def test_mpich_gets_its_own_options() -> None:
    line = command_line(Mpirun("mpirun", own=False, open_mpi=False), (Host("a", 4),), ["A", "B"], [])
    assert line[1:7] == ["-hosts", "a:4", "-n", "4", "-genvlist", "A,B"]


def test_the_wheels_mpi_gets_settings_unless_the_user_has_set_them() -> None:
    one, two = (Host("a", 2),), (Host("a", 2), Host("b", 2))
    assert settings(WHEEL, one, {})["OMPI_MCA_btl"] == "self,sm"
    assert settings(WHEEL, two, {})["OMPI_MCA_btl"] == "self,sm,tcp"
    assert "OMPI_MCA_mpi_abort_delay" not in settings(WHEEL, one, {})
    assert settings(WHEEL, two, {})["OMPI_MCA_mpi_abort_delay"] == "1"
    assert "OMPI_MCA_btl" not in settings(WHEEL, two, {"OMPI_MCA_btl": "tcp,self"})


def test_waiting_ranks_yield_where_they_outnumber_the_cores() -> None:
    many = len(os.sched_getaffinity(0)) + 1
    assert settings(WHEEL, (Host("localhost", many),), {})["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in settings(WHEEL, (Host("localhost", 1),), {})


def test_a_sites_mpi_gets_no_settings() -> None:
    assert settings(Mpirun("/opt/mpi/mpirun", own=False, open_mpi=True), (Host("a", 2),), {}) == {}


def test_without_mpirun_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpirun.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'tutti\[mpi\]'"):
        find_mpirun()


@needs_mpirun
@pytest.mark.mpi
def test_the_ranks_get_a_large_payload_and_the_result_comes_back() -> None:
    payload = b"x" * 300_000
    placement = place_ranks(hosts="localhost:2")
    ranks = start("tests.launch.entries:describe", payload, placement)
    assert isinstance(ranks, list)
    local = place_ranks(2)
    for rank, one in enumerate(ranks):
        assert (one["rank"], one["size"], one["payload"], one["launcher"]) == (rank, 2, payload, "MPIRUN")
        assert (one["threads"], one["joined"], one["nested"]) == (local.threads, True, 2)
        assert not local.cores or tuple(one["cores"]) == local.cores[rank]
    assert wait_until_gone(one["pid"] for one in ranks) == []


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks come with torch imported, which takes seconds in those of a user."""
    monkeypatch.setattr(ranks_on_hosts, "command_line", forked_mpi_ranks())


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
def test_an_exception_comes_back_and_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="seven is not a colour") as caught:
        start("tests.launch.entries:fail", str(tmp_path).encode(), place_ranks(hosts="localhost:3"))
    assert time.monotonic() - float((tmp_path / "when").read_text()) < LIMIT_S
    assert caught.value.rank == 1
    assert wait_until_gone(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)) == []


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.usefixtures("_forked")
def test_a_killed_rank_is_named() -> None:
    with pytest.raises(PeerLost) as caught:
        start("tests.launch.entries:die", b"kill", place_ranks(hosts="localhost:2"))
    assert caught.value.ranks == [1]


def started_as(monkeypatch: pytest.MonkeyPatch, program: str) -> RanksOnHosts:
    """Ranks whose mpirun is a shell program."""
    fake = Mpirun("mpirun", own=False, open_mpi=True)
    monkeypatch.setattr(ranks_on_hosts, "find_mpirun", lambda: fake)
    monkeypatch.setattr(ranks_on_hosts, "command_line", lambda *_, **__: ["bash", "-c", program])
    return RanksOnHosts("package:entry", b"", place_ranks(1, hosts="localhost:1"))


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("sleep 300 & exit 7", LauncherLost, "mpirun ended with exit code 7"),
        ("kill -9 $$", LauncherLost, "was killed by signal 9"),
        ("exit 0", LauncherLost, "mpirun ended with exit code 0"),
    ],
)
def test_the_end_of_mpirun_before_all_ranks_are_done_is_an_error(
    monkeypatch: pytest.MonkeyPatch, program: str, error: type[TuttiError], said: str
) -> None:
    ranks = started_as(monkeypatch, program)
    with SignalWatch() as signals, ranks:
        assert ranks.wait(StopRequests(signals), 60.0, None) is End.MPIRUN
    with pytest.raises(error, match=said):
        ranks.result()


def test_another_mpirun_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = iter(["sleep 300", "exit 7"])
    started_as(monkeypatch, "").__exit__()
    monkeypatch.setattr(ranks_on_hosts, "command_line", lambda *_, **__: ["bash", "-c", next(tries)])
    monkeypatch.setattr(ranks_on_hosts, "FIRST_S", 0.1)
    with pytest.raises(LauncherLost, match="mpirun ended with exit code 7"):
        ranks_on_hosts.run_on_hosts("package:entry", b"", place_ranks(1, hosts="localhost:1"))
    assert "started no rank within 0.1 s; another one is tried" in capfd.readouterr().err


def test_a_rank_that_cannot_reach_the_launching_process_says_so() -> None:
    address = pickle.dumps(LauncherAddress(("127.0.0.1",), 1, b"", 3))
    start = base64.urlsafe_b64encode(address).decode()
    words = [sys.executable, "-m", "tutti.launch.mpi_rank"]
    done = subprocess.run(
        words, env={**os.environ, START: start}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "cannot reach port 1 of 127.0.0.1: is there a firewall?" in done.stderr


@pytest.mark.parametrize("before", ["exec sleep 600", "exit 7"])
def test_a_host_is_probed_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    asked, launcher = tmp_path / "asked", tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\n[ -e {asked} ] && exit; touch {asked}; {before}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: Mpirun(str(launcher), own=False, open_mpi=True))
    assert mpirun.answering(["node7"], 0.1) == []
    assert "host node7 does not answer" in capsys.readouterr().err
    asked.unlink(missing_ok=True)
    monkeypatch.setattr(mpirun, "HASTE_S", 0.5)
    assert mpirun.answering(["node7"], LIMIT_S) == ["node7"]


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("whom", "signum", "returncode"),
    [("program", signal.SIGTERM, 143), ("program", signal.SIGKILL, -9), ("mpirun", signal.SIGKILL, 1)],
)
def test_signals_leave_nothing_behind(whom: str, signum: int, returncode: int, tmp_path: Path) -> None:
    # Who looks for mpirun needs that of a user's program.
    python = [sys.executable] if whom == "mpirun" else interpreter(starts_ranks=True)
    with (tmp_path / "stderr").open("w") as stderr:
        program = subprocess.Popen([*python, HERE / "supervised.py", tmp_path, "localhost:2"], stderr=stderr)
    pids: list[int] = []
    try:
        wait_for_files(tmp_path / f"rank-{rank}" for rank in range(2))
        notes = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        pids = [note[who] for note in notes for who in ("rank", "child")]
        os.kill(notes[0]["launcher"] if whom == "mpirun" else program.pid, signum)
        assert program.wait(timeout=60) == returncode
        assert wait_until_gone([*pids, notes[0]["launcher"]]) == []
        segments = [Path(segment) for note in notes for segment in note["segments"]]
        assert segments, "the MPI library makes files in /dev/shm"
        assert not [segment for segment in segments if segment.exists()]
    finally:
        program.kill()
        program.wait()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


def under_mpirun(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = find_mpirun()
    hosts = (Host("localhost", 2),)
    command = command_line(found, hosts, [], [])
    command[command.index(sys.executable) :] = [*interpreter(), str(HERE / "in_mpi.py"), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **settings(found, hosts, os.environ)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@needs_mpirun
@pytest.mark.mpi
def test_under_the_users_mpirun_the_entry_is_called_in_place() -> None:
    done = under_mpirun("start", "world_size", "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result 2") == 2
    assert done.stdout.count("2 ranks x ") == 1, "rank 0 alone announces the plan"
    assert "started by mpirun" in done.stdout


@needs_mpirun
@pytest.mark.mpi
def test_under_the_users_mpirun_a_user_error_is_printed_once() -> None:
    done = under_mpirun("start", "bad_data", "")
    assert done.returncode == 2
    assert done.stderr.count("tutti: error: the labels are 12, expected 0 to 9; check the file") == 1
    assert "Traceback" not in done.stderr


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "said"),
    [("raise", "ValueError: seven is not a colour"), ("exit", "tutti: error: lost rank 1: it left")],
)
def test_a_rank_that_ends_early_in_a_custom_loop_ends_the_job(how: str, said: str) -> None:
    done = under_mpirun("join", how)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
    assert "MPI_ABORT" not in done.stderr, "a page of MPI's would hide what has been said"
