"""One process forks the ranks of many jobs: they start at once, and know nothing of each other."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from tests.launch.processes import lives, wait_for_files, wait_until_gone
from tutti.errors import PeerLost, RankFailed
from tutti.launch import fork_server_client
from tutti.launch.placement import Placement
from tutti.launch.rank_main import RankSetting
from tutti.launch.signals import SignalWatch
from tutti.launch.start import start
from tutti.launch.stop_request import StopPage, StopRequests
from tutti.launch.supervisor import Supervisor

TWO = Placement(2, 1)
RANKS = [RankSetting(1, tuple(os.sched_getaffinity(0)))] * 2
OF_A_FARM = "tutti.farm.coordinator:TrainTask"


def circumstances() -> list[dict[str, Any]]:
    """Of both ranks of a job."""
    return cast("list[dict[str, Any]]", start("tests.launch.entries:circumstances", b"", TWO))


def test_one_process_forks_the_ranks_of_many_jobs_which_know_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One that a user has; those of all other tests are forked.
    fork_server_client.end_ranks()
    monkeypatch.setattr(fork_server_client, "subprocess", subprocess)
    first, second = circumstances(), circumstances()
    (server,) = {one["server"] for one in first + second}
    assert [one["remembered"] for one in first + second] == [[0], [1], [0], [1]]
    assert len({one["random"] for one in first + second}) == 4
    assert lives(server)
    fork_server_client.end_ranks()
    assert not lives(server)


def test_ranks_come_from_a_prepared_server() -> None:
    fork_server_client.end_ranks()
    fork_server_client.prepare_ranks(OF_A_FARM)
    (prepared,) = fork_server_client._kept
    assert [one["of a farm"] for one in circumstances()] == [True, True]
    assert fork_server_client._kept == [prepared]


def test_ranks_see_folder_path_arguments_and_environment_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = circumstances()[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    monkeypatch.setenv("A_VARIABLE", "now")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    now = circumstances()[1]
    assert now["server"] == before["server"]
    assert (now["folder"], now["arguments"]) == (str(tmp_path), ["program", "--option"])
    assert now["path"] == sys.path != before["path"]
    assert (before["variable"], now["variable"], now["bound"]) == (None, "now", None)


def test_other_numbers_of_ranks_and_threads_take_the_same_server() -> None:
    before = circumstances()[0]["server"]
    assert start("tests.launch.entries:sum_of_ranks", b"", Placement(3, 1)) == 3
    assert start("tests.launch.entries:sum_of_ranks", b"", Placement(2, 2)) == 1
    assert circumstances()[0]["server"] == before


def test_a_server_outlives_the_thread_that_started_it() -> None:
    fork_server_client.end_ranks()
    servers: list[object] = []
    thread = threading.Thread(target=lambda: servers.append(circumstances()[0]["server"]))
    thread.start()
    thread.join()
    assert circumstances()[0]["server"] == servers[0]


def test_a_job_that_fails_leaves_a_server_for_the_next(tmp_path: Path) -> None:
    server = circumstances()[0]["server"]
    with pytest.raises(RankFailed):
        start("tests.launch.entries:fail", str(tmp_path).encode(), Placement(3, 1))
    with pytest.raises(PeerLost):
        start("tests.launch.entries:die", b"kill", TWO)
    with pytest.raises(KeyboardInterrupt):
        start("tests.launch.entries:interrupt", str(os.getpid()).encode(), TWO)
    assert circumstances()[0]["server"] == server


def test_a_daemon_that_a_rank_leaves_is_ended_before_the_job_is_over() -> None:
    daemons = cast("list[int]", start("tests.launch.entries:leave_a_daemon", b"", TWO))
    assert daemons
    assert not any(lives(daemon) for daemon in daemons)


def test_a_server_that_was_killed_is_replaced() -> None:
    server = circumstances()[0]["server"]
    os.kill(server, signal.SIGKILL)
    assert wait_until_gone([server]) == []
    assert circumstances()[0]["server"] != server


def test_children_of_ranks_end_with_a_killed_server(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"the process that forked all ranks ended: killed by signal 9"):
        start("tests.launch.entries:kill_server", str(tmp_path).encode(), TWO)
    notes = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert not any(lives(process) for note in notes for process in note)


def test_a_server_without_work_ends_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server_client.end_ranks()
    monkeypatch.setattr(fork_server_client, "IDLE_S", 0.1)
    server = circumstances()[0]["server"]
    assert wait_until_gone([server]) == []
    monkeypatch.undo()
    assert circumstances()[0]["server"] != server


def test_a_process_that_the_program_forks_leaves_the_server_to_its_parent() -> None:
    server = circumstances()[0]["server"]
    child = os.fork()
    if child == 0:
        fork_server_client.end_ranks()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert circumstances()[0]["server"] == server


def end_of(crew: Supervisor) -> object:
    """The end of its work."""
    with SignalWatch() as signals:
        return crew.wait(StopRequests(signals))


def waiting(folder: Path) -> list[int]:
    """The ranks that wait for ever, and their children."""
    notes = [folder / f"rank-{rank}" for rank in range(2)]
    wait_for_files(notes)
    return [json.loads(note.read_text())[what] for note in notes for what in ("rank", "child")]


def test_groups_of_ranks_begin_and_end_without_each_other(tmp_path: Path) -> None:
    waits, entry = "tests.launch.entries:wait_for_ever", "tests.launch.entries:sum_of_ranks"
    stop = StopPage.make_file()
    with fork_server_client.fork_server() as server:
        first = server.group()
        ended = Supervisor(first, waits, str(tmp_path).encode(), RANKS, stop)
        processes = waiting(tmp_path)
        second = server.group()
        lasting = Supervisor(second, entry, b"", RANKS, stop)
        first.close()
        assert wait_until_gone(processes) == []
        assert pickle.loads(cast("bytes", end_of(lasting))) == 1
        for one in (ended, lasting, second):
            one.close()
    os.close(stop)
