"""The rendezvous of ranks: one file inside a host, an address of rank 0 over several."""

from __future__ import annotations

import dataclasses
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tutti.comm.mpi import library
from tutti.errors import PeerLost, UserError
from tutti.launch import rendezvous
from tutti.launch.rendezvous import Offer, addresses_here, find_first_rank, listening, reach, shared_file


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
    monkeypatch.setattr(rendezvous, "_user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(UserError, match=str(os.geteuid() + 1)):
        shared_file(job, 1, 2, 30.0)
    os.close(file)


def test_the_kernel_tells_whose_a_socket_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert rendezvous._user_of(one) == os.geteuid()


def test_a_rank_does_not_wait_for_ever_for_rank_0() -> None:
    with pytest.raises(PeerLost, match="rank 0"):
        shared_file(f"{os.getpid()} nobody", 1, 2, 0.05)


def test_the_first_address_that_answers_is_taken() -> None:
    with listening("127.0.0.1") as offer:
        several = dataclasses.replace(offer, addresses=("no such address", "127.0.0.1"))
        assert reach(several) == "127.0.0.1"


def test_who_answers_with_another_token_is_not_rank_0() -> None:
    with listening("127.0.0.1") as offer:
        other = dataclasses.replace(offer, token="x" * len(offer.token), addresses=("127.0.0.1",))
        assert reach(other) is None


def test_every_rank_says_which_host_cannot_reach_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = iter([[(Offer(("10.0.0.1",), 1, "x"), 7)], [("a", "10.0.0.1"), ("b", None)]])
    monkeypatch.setattr(library, "world_place", lambda: (1, 2, None))
    monkeypatch.setattr(library, "from_all", lambda _: next(gathered))
    monkeypatch.setattr(rendezvous, "reach", lambda _: "10.0.0.1")
    with pytest.raises(UserError, match=r"b cannot reach rank 0 .* \(10.0.0.1\).*mpirun -x MASTER_ADDR"):
        find_first_rank(2, 0)


def test_the_addresses_of_a_host_end_with_those_that_only_it_knows() -> None:
    found = addresses_here()
    local = [one.startswith("127.") for one in found]
    assert local == sorted(local)
    assert any(local)
