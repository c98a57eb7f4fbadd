"""Starts programs of this folder as their users do, within a time, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.run

from tests.ecosystem.outcomes import BACKENDS, PORTS, RANKS
from tests.mpi import mpirun as mpi
from tests.mpi.mpirun import run
from tests.ports import held_ports
from tests.preloaded import SERVER, interpreter, server_socket

HERE = Path(__file__).parent
TIMEOUT_S = 300.0


def torchrun(
    program: str,
    *arguments: str,
    ranks: int = RANKS,
    settings: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """What the program said and its exit code, run by torchrun."""
    launcher = [*interpreter(), torch.distributed.run.__file__, "--nproc-per-node", str(ranks)]
    # The rendezvous in a store of its own: a port that is free, and no look-up of this machine's name.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [*launcher, *rendezvous, "--no-python", *interpreter(), str(HERE / program), *arguments]
    return run(command, _environment() | dict(settings or {}), timeout_s)


def mpirun(program: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """What the program said and its exit code, run by this environment's mpirun."""
    with meeting_point() as variables:
        settings = _environment() | variables
        return mpi.mpirun(RANKS, HERE / program, *arguments, settings=settings, timeout_s=timeout_s)


@contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """The environment variables that tell ranks where they meet: a port for each group of the job.

    On the port of the group before, a rank that is early would reach a store that is being closed.
    """
    with held_ports(len(BACKENDS)) as ports:
        every = ",".join(map(str, ports))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), PORTS: every}


def _environment() -> dict[str, str]:
    """The tests' modules can be imported by the programs, and what these start is forked as they are."""
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *([path] if path else [])]),
        SERVER: server_socket(),
    }
