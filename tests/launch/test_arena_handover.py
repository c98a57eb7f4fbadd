"""One file for the ranks that somebody else started on a host."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tutti.errors import PeerLost, UserError
from tutti.launch import arena_handover
from tutti.launch.arena_handover import shared_file


def test_all_ranks_get_the_file_of_rank_0() -> None:
    job = f"{os.getpid()} together"
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(shared_file, job, rank, 3, 30.0) for rank in (1, 2)]
        files = [shared_file(job, 0, 3, 30.0), *(other.result() for other in others)]
    assert len({os.fstat(file).st_ino for file in files}) == 1
    assert len(set(files)) == 3
    for file in files:
        os.close(file)


def test_jobs_have_files_of_their_own() -> None:
    files = [shared_file(f"{os.getpid()} {job}", 0, 1, 30.0) for job in "ab"]
    assert os.fstat(files[0]).st_ino != os.fstat(files[1]).st_ino
    for file in files:
        os.close(file)


def test_a_name_that_is_taken_is_no_meeting_place() -> None:
    job = f"{os.getpid()} taken"
    file = shared_file(job, 0, 2, 30.0)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        shared_file(job, 0, 2, 30.0)
    os.close(file)


def test_nothing_is_taken_from_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"{os.getpid()} foreign"
    file = shared_file(job, 0, 2, 30.0)
    monkeypatch.setattr(arena_handover, "_user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(UserError, match=str(os.geteuid() + 1)):
        shared_file(job, 1, 2, 30.0)
    os.close(file)


def test_the_kernel_tells_whose_a_socket_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert arena_handover._user_of(one) == os.geteuid()


def test_a_rank_does_not_wait_for_ever_for_rank_0() -> None:
    with pytest.raises(PeerLost, match="rank 0"):
        shared_file(f"{os.getpid()} nobody", 1, 2, 0.05)
