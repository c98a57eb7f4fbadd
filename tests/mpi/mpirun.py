"""Runs programs under the environment's mpirun, within a time, and leaves none of their processes behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.preloaded import interpreter

PROGRAMS = Path(__file__).parent
MPIRUN = Path(sysconfig.get_path("scripts"), "mpirun")
SETTINGS = {
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_coll": "^han,adapt",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""What the wheel's Open MPI needs here: ranks outnumber cores, and its UCX prints errors."""

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What a test before may have left in the environment, and what ranks of mpirun find out by themselves."""

needs_mpirun = pytest.mark.skipif(
    not MPIRUN.is_file() or importlib.util.find_spec("mpi4py") is None,
    reason="there is no mpirun beside this Python; pip install 'tutti[mpi]'",
)


def mpirun(
    ranks: int,
    program: str | Path,
    *arguments: str,
    options: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
    forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of this machine.

    Args:
        ranks: how many.
        program: a name in this folder, or a path.
        arguments: of the program.
        options: of mpirun.
        settings: further environment variables.
        timeout_s: after so long everything is killed.
        forked: whether ranks come with torch imported; else they start as a user's do.
    """
    command = [
        str(MPIRUN),
        "--oversubscribe",
        *options,
        "-n",
        str(ranks),
        *(interpreter() if forked else [sys.executable]),
        str(PROGRAMS / program),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    return run([*command, *arguments], {**SETTINGS, "OMPI_MCA_btl": "self,sm", **(settings or {})}, timeout_s)


def run(
    command: Sequence[str], settings: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, which is killed when the time is over."""
    # Killed ranks leave files of Open MPI behind; here they leave them where they are removed.
    with tempfile.TemporaryDirectory(
        prefix="tutti-mpi-", dir="/dev/shm", ignore_cleanup_errors=True
    ) as folder:
        places = {"TMPDIR": folder, "OMPI_MCA_btl_sm_backing_directory": folder}
        inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
        return _run(command, {**inherited, **settings, **places}, timeout_s)


def _run(
    command: Sequence[str], environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            # Launchers put their ranks into groups of their own; asked politely, they end them first.
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def results(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """The RESULT lines that the ranks printed."""
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines]
