"""Ranks on two hosts, each with a name and a network of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import PROGRAMS, needs_mpirun, results
from tests.preloaded import interpreter

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, needs_mpirun, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as made:
        yield made


def test_hosts_have_their_own_names_and_reach_each_other(hosts: Hosts) -> None:
    done = subprocess.run(
        hosts.on("b", ["sh", "-c", "hostname; getent hosts a"]),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.split() == ["b", "10.77.0.1", "a"]


@pytest.mark.parametrize(("on_a", "on_b"), [(1, 1), (2, 3)])
def test_contract_across_hosts(hosts: Hosts, on_a: int, on_b: int) -> None:
    done = hosts.mpirun({"a": on_a, "b": on_b}, [*interpreter(), str(PROGRAMS / "contract.py")])
    assert results(done) == [{"hosts": 2, "size": on_a + on_b, "failures": {}}], done.stderr
    assert done.returncode == 0


def test_nothing_is_left_of_hosts_that_are_gone() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    sleepers = []

    def fail_among_hosts() -> None:
        with Hosts(["c", "d"]) as made:
            sleepers.append(subprocess.Popen(made.on("d", ["sleep", "100"])))
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        fail_among_hosts()
    assert sleepers[0].wait(timeout=20) != 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"tutti-{os.getpid()}-c" not in left
    assert f"tutti-{os.getpid()}-d" not in left
