"""`--hosts` with hosts that have names and networks of their own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tests.preloaded import interpreter

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, needs_mpirun]

PROGRAM = Path(__file__).with_name("on_hosts.py")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as made:
        yield made


def on_hosts(hosts: Hosts, *arguments: str, forked: bool = True) -> subprocess.CompletedProcess[str]:
    """Start ranks, which come with torch imported if they are forked."""
    words = [
        word for word in hosts.mpirun_arguments if word not in ("--allow-run-as-root", "--oversubscribe")
    ]
    setting = f"TUTTI_MPIRUN_ARGS={shlex.join(words)}"
    python = interpreter(starts_ranks=True) if forked else [sys.executable]
    return hosts.run(["env", setting, *python, str(PROGRAM), *arguments])


def test_ranks_start_on_every_host_and_the_result_comes_back(hosts: Hosts) -> None:
    done = on_hosts(hosts, "a:1,b:2", "places", "hello", forked=False)
    assert done.returncode == 0, done.stderr
    described, result = done.stdout.splitlines()
    assert described == "3 ranks on 2 hosts (a: 1, b: 2), started by mpirun"
    assert json.loads(result) == [2, [["a", "hello"], ["b", "hello"], ["b", "hello"]]]


def test_servers_are_on_the_last_host_beside_its_workers(hosts: Hosts) -> None:
    done = on_hosts(hosts, "a:2,b:1", "take_sides", "2", "2")
    assert done.returncode == 0, done.stderr
    described, result = done.stdout.splitlines()
    assert described == "3 ranks and 2 servers on 2 hosts (a: 2, b: 1), started by mpirun"
    found = [(one["host"], one["serving"], one["answer"]) for one in json.loads(result)]
    assert found == [
        ("a", False, 3.0),
        ("a", False, 3.0),
        ("b", False, 3.0),
        ("b", True, 3.0),
        ("b", True, 0.0),
    ]
