"""A run that loses a host continues on a spare one, and ends with the weights of an undisturbed run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pytest
import torch

from tests.cluster.hosts import TEMPORARY, Hosts, why_not
from tests.cluster.waiting_model import WAITS_FOR
from tests.mpi.mpirun import needs_mpirun
from tutti.exports.sources import read_from

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, needs_mpirun, pytest.mark.timeout(400)]

WAITING = Path(__file__).parent / "waiting_model.py"

RANK = [b"-P", b"-m", b"tutti.launch.mpi_rank"]
"""The arguments of a rank's Python."""

TRAIN = (
    *("train", "mlp", "--model.hidden", "16", "--data", "digits", "--epochs", "6"),
    *("--batch-size", "256", "--precision", "fp64"),
)


WAITS = (
    *("train", f"{WAITING}:build", "--data", "digits", "--epochs", "2", "--checkpoint", "off"),
    *("--hosts", "a:1,b:1", "--batch-size", "64"),
)


@contextmanager
def waiting(hosts: Hosts, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training on two hosts, of which all ranks wait in a step; it is killed at the end of the block."""
    arguments = shlex.join(word for word in hosts.mpirun_arguments if word != "--allow-run-as-root")
    environment = {**os.environ, **hosts.settings, "TUTTI_MPIRUN_ARGS": arguments}
    reached = folder / "go-on.reached"
    with subprocess.Popen(
        hosts.on("a", [sys.executable, "-m", "tutti", *WAITS, "--out", str(folder / "run"), *options]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, WAITS_FOR: str(folder / "go-on")},
    ) as program:
        while not reached.exists() and program.poll() is None:
            time.sleep(0.02)
        try:
            yield program
        finally:
            program.kill()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, of which each sees nothing but its own."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(["a", "b"], apart=True) as made:
        yield made


def arguments_of(process: int) -> list[bytes]:
    """The words that a process was started with; none if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def ranks_on(hosts: Hosts, host: str) -> list[int]:
    """The processes of the ranks on a host."""
    return sorted(
        process
        for process in hosts.processes(host)
        if arguments_of(process)[1:-1] == RANK  # mpirun has the same words, and more.
    )


def line_with(words: str, program: subprocess.Popen[str]) -> str:
    """The next line of the program that has those words."""
    said = []
    for line in cast("IO[str]", program.stdout):
        said.append(line)
        if words in line:
            return line
    raise AssertionError(f"it ended without {words!r}:\n{''.join(said)}")


def is_empty(hosts: Hosts, but: str | None = None) -> bool:
    """Whether, soon, nothing runs any more on any host, and no file of MPI's is there.

    Args:
        hosts: all of them.
        but: one where such a file may be: a daemon was cut off there that had no rank yet, and MPI's daemon
            does not always remove its folder then.
    """
    deadline = time.monotonic() + 20
    while any(map(hosts.processes, hosts.names)) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [host for host in hosts.names if host != but]
    kept = [file for host in names for file in hosts.file(host, TEMPORARY).glob("*prte*")]
    return not kept and not any(map(hosts.processes, hosts.names))


def test_a_rank_that_was_killed_is_replaced(hosts: Hosts, tmp_path: Path) -> None:
    with waiting(hosts, tmp_path, "--on-failure", "respawn") as program:
        os.kill(ranks_on(hosts, "b")[0], signal.SIGKILL)
        # A rank may say before what it has lost.
        lost = line_with("continuing", program)
        (tmp_path / "go-on").touch()
        said = program.communicate(timeout=100)[0]
    assert re.search(r"lost rank \d.*; continuing with 2 ranks", lost)
    assert "resumed after step" in said
    assert program.returncode == 0, said
    assert is_empty(hosts)


def test_a_host_that_stands_by_takes_the_place_of_one_without_power(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    alone, survived = tmp_path / "alone", tmp_path / "survived"
    tutti = [sys.executable, "-m", "tutti", *TRAIN]
    subprocess.run([*tutti, "-n", "2", "--out", str(alone)], check=True, capture_output=True, timeout=200)
    with Hosts(["a", "b", "c"], apart=True) as hosts:
        arguments = shlex.join(word for word in hosts.mpirun_arguments if word != "--allow-run-as-root")
        placed = ["--hosts", "a:1,b:1,c:1", "-n", "2", "--on-failure", "respawn", "--out", str(survived)]
        environment = {**os.environ, **hosts.settings, "TUTTI_MPIRUN_ARGS": arguments}
        said = []
        with subprocess.Popen(
            hosts.on("a", [*tutti, *placed]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:
                said.append(line)
                if re.match(r"\s*epoch +2/6", line):
                    hosts.kill("b")
        assert program.returncode == 0, "".join(said)
        assert [host for host in hosts.names if hosts.processes(host)] == []
    text = "".join(said)
    assert (
        "lost host b: it cannot be reached any more; continuing with 2 ranks on 2 hosts (a: 1, c: 1)" in text
    )
    assert "resumed after step" in text
    # On one host the same sums are made in another order.
    before, after = (read_from(folder).weights for folder in (alone, survived))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
