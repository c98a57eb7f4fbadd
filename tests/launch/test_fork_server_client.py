"""One process forks the ranks of many jobs: they start at once, and know nothing of each other."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tutti
from tests.launch.processes import lives, wait_for_files, wait_until_gone
from tutti.errors import PeerLost, RankFailed, UserError
from tutti.launch import fork_server, fork_server_client
from tutti.launch.crew import Crew, Outcome
from tutti.launch.fork_server import Branch, ForkServerProcess, Load, NotForked, Ready, receive, send
from tutti.launch.fork_server_client import ForkServer
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.launch.stop_request import StopPage

TWO = Placement(2, 1)
OF_A_FARM = "tutti.farm.messages:TrainTask"


def circumstances() -> list[dict[str, Any]]:
    """Of both ranks of a job."""
    return cast("list[dict[str, Any]]", start("tests.launch.entries:circumstances", b"", TWO))


def test_a_message_without_all_its_descriptors_is_none(tmp_path: Path) -> None:
    most, (here, there) = resource.getrlimit(resource.RLIMIT_NOFILE), socket.socketpair()
    sent = tmp_path / "sent"
    with here, there, sent.open("w") as file, open(os.devnull) as last:
        send(here, Load("entry"), [file.fileno()] * 3)
        # One finds room, at least.
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 2, most[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                receive(there)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        found = [one for one in Path("/proc/self/fd").iterdir() if one.resolve() == sent]
        assert [int(one.name) for one in found] == [file.fileno()]


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


def test_ranks_come_from_what_was_prepared_for_such_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server_client.end_ranks()
    fork_server_client.prepare_ranks(OF_A_FARM, 1, crowded=False)
    (prepared,) = fork_server_client._kept
    # As if scikit-learn had been imported meanwhile.
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    fork_server_client.prepare_ranks(OF_A_FARM, 1, crowded=False)
    assert fork_server_client._kept == [prepared], "one is enough"
    with fork_server_client.fork_server(1, crowded=False) as server:
        assert server is prepared
    assert not fork_server_client._kept, "it has not imported torch yet"
    fork_server_client.prepare_ranks(OF_A_FARM, 2, crowded=False)
    with fork_server_client.fork_server(1, crowded=False) as server:
        assert server._made_for["OMP_NUM_THREADS"] == "1"


def test_ranks_find_what_was_prepared_for_them() -> None:
    fork_server_client.end_ranks()
    fork_server_client.prepare_ranks(OF_A_FARM, 1, crowded=False)
    (prepared,) = fork_server_client._kept
    assert [one["of a farm"] for one in circumstances()] == [True, True]
    assert fork_server_client._kept == [prepared]


def test_a_server_that_was_killed_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ForkServer(1, crowded=False)) as server:
        assert server.runs
        process = server._process.pid
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        # As long as the kernel gives its memory back nobody is told of its end.
        with monkeypatch.context() as context:
            context.setattr(server._process, "poll", lambda: None)
            assert not server.runs


def test_no_openmp_runtime_binds_the_threads_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert [one["bound"] for one in circumstances()] == [None, None]


def test_training_again_gives_the_same_bits() -> None:
    def train() -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"model_options": {"hidden": [16], "dropout": 0.1}, "quiet": True}
        return tutti.train("mlp", "digits", workers=2, epochs=1, **options).model.state_dict()

    fork_server_client.end_ranks()
    cold, warm = train(), train()
    assert all(torch.equal(cold[name], warm[name]) for name in cold)


def test_ranks_do_not_look_for_garbage_in_what_was_imported_before_them() -> None:
    assert start("tests.launch.entries:watches_for_garbage", b"", TWO) == (True, False, True)


def test_ranks_see_folder_path_and_arguments_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = circumstances()[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    now = circumstances()[1]
    assert now["server"] == before["server"]
    assert (now["folder"], now["arguments"]) == (str(tmp_path), ["program", "--option"])
    assert now["path"] == sys.path != before["path"]


def test_ranks_start_where_the_folder_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert start("tests.launch.entries:sum_of_ranks", b"", TWO) == 1


def test_another_environment_takes_another_server_and_so_does_another_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = circumstances()[0]
    monkeypatch.setenv("A_VARIABLE", "now")
    now = circumstances()[0]
    assert (before["variable"], now["variable"]) == (None, "now")
    assert now["server"] != before["server"]
    assert not lives(before["server"])
    # Another number of ranks does not, another number of threads does.
    assert start("tests.launch.entries:sum_of_ranks", b"", Placement(3, 1)) == 3
    assert circumstances()[0]["server"] == now["server"]
    assert start("tests.launch.entries:sum_of_ranks", b"", Placement(2, 2)) == 1
    assert not lives(now["server"])


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
    assert circumstances()[0]["server"] != server


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


def test_jobs_of_two_threads_run_at_the_same_time() -> None:
    outcomes: list[object] = []
    threads = [
        threading.Thread(
            target=lambda: outcomes.append(start("tests.launch.entries:sum_of_ranks", b"", Placement(3, 1)))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [3, 3]


def test_a_server_that_cannot_be_started_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    pair = socket.socketpair

    def noted(*arguments: int) -> tuple[socket.socket, ...]:
        made.extend(pair(*arguments))
        return tuple(made)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(socket, "socketpair", noted)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        ForkServer(1, False)
    assert [one.fileno() for one in made] == [-1, -1]


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
def test_ranks_are_gone_with_what_they_have_started(tmp_path: Path, grace_s: float) -> None:
    selector, stop = selectors.DefaultSelector(), StopPage.make_file()
    with fork_server_client.fork_server(1, crowded=False) as server:
        entry = "tests.launch.entries:wait_for_ever"
        crew = Crew(server.branch(entry), entry, str(tmp_path).encode(), TWO, stop)
        crew.register(selector)
        notes = [tmp_path / f"rank-{rank}" for rank in range(2)]
        wait_for_files(notes)
        processes = [json.loads(note.read_text())[what] for note in notes for what in ("rank", "child")]
        # The process that forks them says that it listens before it says anything else.
        selector.select()
        crew._note_message()
        selector.close()
        end(crew, grace_s)
    os.close(stop)
    assert not any(map(lives, processes))


def test_a_server_that_cannot_fork_says_so_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        monkeypatch.setattr(os, "fork", refuse)
        server = ForkServerProcess(os.getpid(), os.getppid(), there.fileno(), 1.0)
        try:
            assert not server._fork(Branch(""), there)
        finally:
            gc.unfreeze()
        message, _ = receive(here)
    assert isinstance(message, NotForked)
    assert message.why.startswith(
        "no further process can be started: raise the limit of this user (ulimit -u"
    )


def test_a_server_says_that_it_listens_once_it_has_imported_what_ranks_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    imported: list[tuple[str, bool]] = []

    def load(entry: str) -> None:
        has_spoken = bool(select.select([here], [], [], 0.0)[0])
        imported.append((entry, has_spoken))

    monkeypatch.setattr(fork_server, "_load", load)
    with here:
        send(here, Load(OF_A_FARM))
        ForkServerProcess(os.getpid(), os.getppid(), there.detach(), 0.01).serve()
        assert receive(here) == (Ready(), [])
    assert imported == [(OF_A_FARM, False), (OF_A_FARM, True)]


def test_what_is_imported_before_leaves_the_message_and_its_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(fork_server, "_load", imported.append)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        with here:
            fork_server._load_for_first(there)
            send(here, Branch(OF_A_FARM), [here.fileno()])
            fork_server._load_for_first(there)
        message, (descriptor,) = receive(there)
        os.close(descriptor)
        fork_server._load_for_first(there)
    assert (message, imported) == (Branch(OF_A_FARM), [OF_A_FARM])


class Limited:
    """A fork server of this process that may open no file while the block lasts."""

    def __init__(self, server: ForkServer) -> None:
        self._process = server._process.pid
        self._before = resource.prlimit(self._process, resource.RLIMIT_NOFILE)

    def __enter__(self) -> None:
        resource.prlimit(self._process, resource.RLIMIT_NOFILE, (3, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.prlimit(self._process, resource.RLIMIT_NOFILE, self._before)


def end(crew: Crew, grace_s: float) -> None:
    """End its ranks, and the branch that has forked them."""
    crew._server.clear(grace_s)
    crew._server.close()
    crew.close()


def outcome_of(crew: Crew) -> Outcome:
    """The end of its work."""
    with selectors.DefaultSelector() as selector:
        crew.register(selector)
        while (outcome := crew.outcome()) is None:
            for key, _ in selector.select(crew.patience_s()):
                key.data()
    return outcome


def test_ranks_that_could_not_be_forked_leave_the_others_and_their_server_alone(tmp_path: Path) -> None:
    entry, stop = "tests.launch.entries:sum_of_ranks", StopPage.make_file()
    waits = "tests.launch.entries:wait_for_ever"
    with fork_server_client.fork_server(1, crowded=False) as server:
        others = Crew(server.branch(waits), waits, str(tmp_path).encode(), TWO, stop)
        wait_for_files([tmp_path / f"rank-{rank}" for rank in range(2)])
        with Limited(server):
            refused = Crew(server.branch(entry), entry, b"", TWO, stop)
            outcome = outcome_of(refused)
            end(refused, 0.0)
        assert isinstance(outcome.error, UserError)
        assert str(outcome.error).startswith(
            "too many open files: raise the limit of this process (ulimit -n)"
        )
        assert others.outcome() is None
        started = Crew(server.branch(entry), entry, b"", TWO, stop)
        assert outcome_of(started) == Outcome(None)
        for crew in (others, started):
            end(crew, 0.0)
    os.close(stop)


def test_what_has_ended_a_branch_with_its_server_is_told(tmp_path: Path) -> None:
    entry, stop = "tests.launch.entries:wait_for_ever", StopPage.make_file()
    with fork_server_client.fork_server(1, crowded=False) as server:
        crew = Crew(server.branch(entry), entry, str(tmp_path).encode(), TWO, stop)
        wait_for_files([tmp_path / f"rank-{rank}" for rank in range(2)])
        os.kill(server._process.pid, signal.SIGILL)
        outcome = outcome_of(crew)
        end(crew, 0.0)
    os.close(stop)
    assert str(outcome.error) == "the process that forked all ranks ended: killed by signal 4 (SIGILL)"
