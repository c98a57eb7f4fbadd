"""Ranks end with the launcher that the user ran, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.launch.processes import lives, wait_for_files, wait_until_gone
from tests.mpi.mpirun import needs_mpirun
from tutti.launch import orphans
from tutti.launch.mpirun import command_line, find_mpirun, settings
from tutti.launch.placement import Host

HERE = Path(__file__).parent

INIT_TORCH = "from torch import distributed; distributed.init_process_group('tutti')"


@needs_mpirun
@pytest.mark.mpi
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    found, hosts = find_mpirun(), (Host("localhost", 2),)
    command = command_line(found, hosts, [], [])
    command[command.index("-P") :] = [str(HERE / "followers.py"), str(tmp_path)]
    environment = {**os.environ, **settings(found, hosts, os.environ)}
    mpirun = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes: list[int] = []
    try:
        wait_for_files(tmp_path / f"rank-{rank}" for rank in range(2))
        notes = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        processes = [process for note in notes for process in note["processes"]]
        assert {note["launcher"] for note in notes} == {mpirun.pid}
        mpirun.kill()
        assert wait_until_gone(processes) == []
        segments = [Path(segment) for note in notes for segment in note["segments"]]
        assert segments, "the MPI library makes files in /dev/shm"
        assert not [segment for segment in segments if segment.exists()]
        assert not Path(tempfile.gettempdir(), f"ompi.{mpirun.pid}").exists()
    finally:
        mpirun.kill()
        mpirun.wait()
        for process in filter(lives, processes):
            os.kill(process, signal.SIGKILL)


def test_a_process_ends_with_the_one_it_follows() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    program = f"from tutti.launch.orphans import follow; follow([{gone.pid}]); import time; time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("names", "followed"),
    [
        (["bash", "sshd"], []),
        (["prterun", "bash"], [100]),
        (["bash", "hydra_pmi_proxy", "mpiexec.hydra", "bash"], [100, 101, 102]),
    ],
)
def test_the_launcher_and_processes_between_are_followed(
    names: list[str], followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    parents = [SimpleNamespace(pid=pid, name=lambda name=name: name) for pid, name in enumerate(names, 100)]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: parents)
    monkeypatch.setattr(orphans, "follow", seen.extend)
    orphans.follow_launcher()
    assert seen == followed


@pytest.mark.parametrize(("link", "file"), [("mpirun.openmpi", "orterun"), ("mpirun.mpich", "mpiexec.hydra")])
def test_a_launcher_that_was_started_by_a_link_of_another_name_is_known_by_its_file(
    link: str, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy("/bin/sleep", tmp_path / file)
    (tmp_path / link).symlink_to(file)
    followed: list[int] = []
    known: list[tuple[int, str]] = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(orphans, "follow", followed.extend)
    monkeypatch.setattr(orphans, "use_library_of", lambda launchers, environ: known.extend(launchers))
    with subprocess.Popen([str(tmp_path / link), "60"]) as launcher:
        monkeypatch.setattr(psutil.Process, "parents", lambda self: [psutil.Process(launcher.pid)])
        orphans.follow_launcher()
        launcher.kill()
    assert followed == [launcher.pid]
    assert known == [(launcher.pid, file)]


@pytest.fixture
def ended_mpirun() -> Iterator[dict[str, str]]:
    """The environment of a shell that an mpirun has started, which has ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # Nobody listens.
        uri = f"prterun-a-7@0.0;tcp4://127.0.0.1:{server.getsockname()[1]}"
        job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
        yield {**os.environ, **job, "PMIX_SERVER_URI41": uri}


def test_an_import_ignores_the_variables_of_an_mpirun_that_has_ended(ended_mpirun: dict[str, str]) -> None:
    program = "import os; before = dict(os.environ); import torch, tutti; assert before == dict(os.environ)"
    subprocess.run([sys.executable, "-c", program], env=ended_mpirun, timeout=120, check=True)


def test_a_program_that_joins_the_job_of_an_mpirun_that_has_ended_is_refused(
    ended_mpirun: dict[str, str],
) -> None:
    command = [sys.executable, "-c", INIT_TORCH]
    rank = subprocess.run(
        command, env=ended_mpirun, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert rank.returncode > 0
    assert "OMPI_" in rank.stderr


@pytest.mark.parametrize("words", [["doctor"], ["run", "-n", "2", __file__]])
def test_a_command_with_another_rank_of_an_mpirun_that_has_ended_says_so(
    words: list[str], ended_mpirun: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tutti", *words]
    environ = {**ended_mpirun, "OMPI_COMM_WORLD_RANK": "1"}
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("unset ${!OMPI_*}") == 1
