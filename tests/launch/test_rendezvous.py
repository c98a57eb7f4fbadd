"""The rendezvous of ranks: one file inside a host, an address of rank 0 over several."""

from __future__ import annotations

import hashlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.other_user import as_another_user, needs_another_user
from tutti.comm.mpi import library
from tutti.errors import PeerLost, UserError
from tutti.launch import rendezvous
from tutti.launch.rendezvous import find_first_rank, shared_file


def test_all_ranks_get_the_file_of_rank_0() -> None:
    job = f"{os.getpid()} together"
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(shared_file, job, rank, 3, 30.0) for rank in (1, 2)]
        files = [shared_file(job, 0, 3, 30.0), *(other.result() for other in others)]
    assert len({os.fstat(file).st_ino for file in files}) == 1
    assert len(set(files)) == 3
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
    monkeypatch.setattr(rendezvous, "_user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(UserError, match="has taken the name"):
        shared_file(job, 1, 2, 30.0)
    os.close(file)


@needs_another_user
def test_another_user_gets_no_file_and_does_not_block_the_ranks() -> None:
    job = f"{os.getpid()} besieged"
    name = "\0tutti-" + hashlib.sha256(f"{os.geteuid()} {job}".encode()).hexdigest()
    file = shared_file(job, 0, 2, 30.0)

    def besiege() -> bytes:
        said = b""
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(name)
                said += connection.recv(1)
        return said

    with as_another_user(besiege) as besieger:
        assert besieger.result() == b""
    other = shared_file(job, 1, 2, 30.0)
    assert os.fstat(other).st_ino == os.fstat(file).st_ino
    for one in (file, other):
        os.close(one)


def test_a_rank_does_not_wait_for_ever_for_rank_0() -> None:
    with pytest.raises(PeerLost, match="rank 0"):
        shared_file(f"{os.getpid()} nobody", 1, 2, 0.05)


def test_the_address_is_one_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "world_place", lambda: (1, 2, None))
    monkeypatch.setattr(library, "from_all", lambda own: [("10.0.0.1", 7), own])
    assert find_first_rank(2, 0) == ("10.0.0.1", 7)
    assert find_first_rank(3, 0) is None
