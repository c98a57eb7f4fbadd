"""The processes that mpirun or srun has started: one of each host works on the farm, with the cores of all.

    host a   rank 0 ── the launch of this host    host b   rank 2 ── the launch of this host
             rank 1 ── asleep until that ends              rank 3 ── asleep until that ends

They speak over a socket of the host, and hosts not at all but through the farm's folder: MPI is not even
begun, so that a host which fails takes no other one with it. With --hosts there is one process on each host,
by an mpirun of its own (`hosts.py`). No torch.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadOption, UserError
from tutti.launch.credentials import is_mine
from tutti.launch.launcher import LaunchContext, started_by, work_alone
from tutti.records.launches import Launches

MEET_S: Final = 120.0
"""Patience of the processes of a host with each other, and of a host with the one that makes the farm."""

FARM_JOB: Final = "TUTTI_FARM_JOB"
"""The environment variable with the name of all launches that one command has started on several hosts."""

FARM_HOST: Final = "TUTTI_FARM_HOST"
"""The environment variable with the number of this host and that of all of them, such as "1/2"."""

_PROBE_S: Final = 0.05
_MOST: Final = 1 << 16
_WAITING: Final = 4096
"""Connections that may wait to be taken; the system allows fewer."""

_TAKEN: Final = (
    "another process of this host has the name under which the processes of this job would meet; start one "
    "job after the other, or the command once on each host with --resume and the same --out"
)
_JOBS: Final = (
    (FARM_JOB,),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
)
"""The variables by which launchers name a job, the same on all hosts."""


@dataclass(frozen=True)
class HostTeam:
    """The place of this process among those that a launcher has started.

    Attributes:
        leads: it works on the farm; else it has nothing to do.
        first: it is to make the farm, which others only join.
        job: the launcher's name for all of them.
        several: there are others on other hosts.
    """

    leads: bool = True
    first: bool = True
    job: str = ""
    several: bool = False

    def wait_for_farm(self, out: str | None) -> None:
        """Wait until the first process works on the farm, where this one is another.

        Raises:
            BadOption: the folder has no name that all hosts know, or this host does not see it.
        """
        if self.several and out is None:
            raise BadOption("a farm on several hosts needs --out: its folder, which all of them see")
        if self.first or out is None:
            return
        until = time.monotonic() + MEET_S
        launches = Launches(Path(out))
        while not any(self.job == beat.job for beat in launches.beats().values()):
            if time.monotonic() > until:
                raise BadOption(
                    f"host {socket.gethostname()} sees nothing in {out} of the farm that the first host "
                    "works on; give --out a folder on a file system that all hosts share, or start the "
                    "command on one host alone"
                )
            time.sleep(_PROBE_S)


@contextmanager
def team_of_host() -> Iterator[HostTeam]:
    """Yield the place of this process; where it does not lead, the one that does has ended by then.

    Raises:
        UserError: the launcher does not tell which processes are on this host, or some do not come.
    """
    place = started_by()
    if not place.given:
        yield HostTeam()
        return
    if place.local_rank is None or place.local_size is None:
        raise UserError(
            f"{place.launcher.value} does not tell which of its processes are on one host; start tutti by "
            "Open MPI's mpirun or by srun, or once on each host with --resume and the same --out"
        )
    job, (number, _, hosts) = job_name(os.environ), os.environ.get(FARM_HOST, "0/1").partition("/")
    # A user may name one machine twice, by two of its names.
    address = f"\0tutti-farm-{os.getuid()}-{job or os.getppid()}-{number}"
    if place.local_rank:
        _sleep_beside(address)
        yield HostTeam(False, False, job)
        return
    with ExitStack() as stack:
        cores = _gather(stack, address, place)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        stack.callback(os.sched_setaffinity, 0, before)
        work_alone()
        first, several = place.rank == 0 and number == "0", place.local_size < place.size or hosts != "1"
        yield HostTeam(True, first, job, several)


def job_name(environ: Mapping[str, str]) -> str:
    """Return the launcher's name for the job of this process; empty if it has none."""
    for names in _JOBS:
        if all(environ.get(name) for name in names):
            return ".".join(environ[name] for name in names)
    return ""


def _gather(stack: ExitStack, address: str, place: LaunchContext) -> set[int]:
    """Wait for the other processes of this host, which sleep from now on; return the cores of all."""
    assert place.local_size is not None
    cores = os.sched_getaffinity(0)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        listener.bind(address)
    except OSError as error:
        raise UserError(_TAKEN) from error
    listener.listen(_WAITING)
    deadline, come = time.monotonic() + MEET_S, 1
    while come < place.local_size:
        try:
            listener.settimeout(max(_PROBE_S, deadline - time.monotonic()))
            other, _ = listener.accept()
            if not is_mine(other):
                other.close()
                continue
            stack.enter_context(other).settimeout(max(_PROBE_S, deadline - time.monotonic()))
            cores |= {int(core) for core in other.recv(_MOST).split()}
            come += 1
        except TimeoutError:
            raise UserError(
                f"{place.launcher.value} has started {place.local_size} processes on this host, of which "
                f"{come} have come in {MEET_S:g} s; start the same command in all of them"
            ) from None
    return cores


def _sleep_beside(address: str) -> None:
    """Lend the cores of this process to the first one of the host, and sleep until that has ended."""
    # It stops as the first one does, which may take a while.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + MEET_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leader:
        while True:
            try:
                leader.connect(address)
                if not is_mine(leader):
                    raise UserError(_TAKEN)
                break
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise UserError(
                        "the first process of this host does not come; see what it says"
                    ) from None
                time.sleep(_PROBE_S)
        with suppress(ConnectionResetError, BrokenPipeError):
            leader.send(" ".join(map(str, os.sched_getaffinity(0))).encode())
            leader.recv(1)
