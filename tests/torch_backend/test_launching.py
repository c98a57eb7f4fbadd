"""The backend is found, and the ranks find each other, whoever starts them."""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tutti.launch.rendezvous import describe_mpi_rank

PROGRAM = Path(__file__).with_name("summing.py")
LIMIT_S = 110


def run(command):
    """The program's output, without the names that 'tutti run' puts before the lines of its ranks."""
    outcome = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in outcome.stdout.splitlines()]
    return sorted(line for line in lines if " of " in line or "mpi4py" in line)


def expected(size):
    return [f"{rank} of {size}: {size * (size + 1) / 2}" for rank in range(size)]


def test_importing_tutti_makes_the_backend_known_without_entry_points():
    program = "import torch; import tutti; print(torch.distributed.is_backend_available('tutti'))"
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    outcome = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert outcome.stdout.strip() == "True"


def test_a_process_without_a_launcher_learns_how_to_get_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK") as caught:
        torch.distributed.init_process_group("tutti")
    assert "use 'tutti run -n 2 SCRIPT', torchrun or mpirun" in caught.value.__notes__[0]


def test_the_environment_is_described_once_and_only_under_mpi():
    environ = {}
    describe_mpi_rank(environ)
    assert environ == {}
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "job",
    }
    describe_mpi_rank(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("3", "4", "3")
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 20_000 <= int(environ["MASTER_PORT"]) < 32_000
    theirs = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "RANK": "1", "WORLD_SIZE": "2"}
    before = dict(theirs)
    describe_mpi_rank(theirs)
    assert theirs == before


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("gpu[03-07,12],cpu1", "gpu03"),
        ("gpu7,gpu8", "gpu7"),
        ("n[1,4]", "n1"),
        ("rack[1-2]n[01-04],x", "rack1n01"),
    ],
)
def test_on_several_hosts_of_slurm_rank_0_is_on_the_first(listed, first):
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": listed,
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_NODEID": "1",
    }
    describe_mpi_rank(environ)
    assert environ["MASTER_ADDR"] == first
    assert environ["LOCAL_RANK"] == "1"


def under_mpirun_on_two_hosts():
    return {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def test_rank_0_holds_the_port_that_it_offers_until_torch_listens_there():
    offered = []

    def find(size, port):
        offered.append(port)
        return "127.0.0.1", port

    for rank in "30":
        describe_mpi_rank({**under_mpirun_on_two_hosts(), "OMPI_COMM_WORLD_RANK": rank}, find)
    assert offered[0] == 0
    with socket.socket() as another, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        another.bind(("127.0.0.1", offered[1]))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", offered[1]))
        store.listen()
