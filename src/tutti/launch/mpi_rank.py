"""The program of a rank that `run_on_hosts` starts: `python -m tutti.launch.mpi_rank`."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Final

from tutti.errors import UserError
from tutti.launch.cores import allowed_cores, leave_binding_to_tutti
from tutti.launch.exit_reports import done, failure, without_launcher
from tutti.launch.launcher import started_by
from tutti.launch.orphans import end_with_daemon, follow_launcher, mpi_segments
from tutti.launch.placement import share_host
from tutti.launch.rank_connections import (
    LauncherAddress,
    LauncherConnection,
    RemoteJob,
    Started,
    Stoppable,
    connect,
)
from tutti.launch.stop_request import StopPage, be_supervised
from tutti.launch.world import end_ranks, join
from tutti.terminal import lasting_output, say_last, warn_on_stderr

START: Final = "TUTTI_MPI_START"
"""The environment variable with a pickled `MpiStart`, in base64."""

START_S: Final = 300
"""Seconds that MPI may take to start in a rank: some wait for ever for one that has died."""


@dataclass(frozen=True)
class MpiStart:
    """The first words to a rank.

    Attributes:
        launcher: the address of the process that ran mpirun.
        path: `sys.path` of that process.
    """

    launcher: LauncherAddress
    path: list[str]

    def encode(self) -> str:
        """Return what `START` is set to."""
        return base64.urlsafe_b64encode(pickle.dumps(self)).decode()


def main() -> None:
    """Be a rank of an MPI job, as the environment says."""
    start: MpiStart = pickle.loads(base64.urlsafe_b64decode(os.environ.pop(START)))
    follow_launcher()
    page = StopPage()
    be_supervised(page)
    connection = connect(start.launcher, started_by().rank)
    if connection is None:
        where = f"port {start.launcher.port} of {', '.join(start.launcher.hosts)}"
        say_last(f"tutti: error: host {socket.gethostname()} cannot reach {where}: is there a firewall?\n")
        os._exit(1)
    page.tell = lambda value: connection.send(Stoppable(value))
    connection.watch(page, end_with_daemon)
    sys.path += [folder for folder in start.path if folder not in sys.path]
    sys.argv[:] = connection.job.arguments
    with lasting_output():
        try:
            _run(connection)
        except BaseException as error:
            connection.leave(failure(started_by().rank, error, without_launcher(error.__traceback__)))
            say_last("")
            end_ranks(error.exit_code if isinstance(error, UserError) else 1)


def _run(connection: LauncherConnection) -> None:
    job = connection.job
    threads = _set_up_process(job)
    # By the kernel: MPI holds the interpreter's lock while it starts.
    signal.alarm(START_S)
    comm = join(threads)
    from tutti.comm.blocking import BlockingCommunicator  # It needs torch, which `join` has imported.

    signal.alarm(0)
    connection.send(Started(mpi_segments()))
    entry = resolve_name(job.entry)  # It imports what takes long.
    if isinstance(comm, BlockingCommunicator):
        connection.last_sign = comm.peers.last_sign
    payload = comm.broadcast_object(job.payload)
    connection.leave(done(comm.rank, entry(comm, payload)))
    comm.close()


def _set_up_process(job: RemoteJob) -> int | None:
    """Bind this process to its share of the host's cores; returns how many threads it may use."""
    context = started_by()
    if context.local_rank is None or context.local_size is None:
        return job.threads
    workers = workers_here(context.rank, context.local_size, job.hosts)
    share = share_host(allowed_cores(), workers, job.threads)
    works = context.local_rank < workers
    if context.local_rank == 0:
        for warning in share.warnings:
            warn_on_stderr(f"on {socket.gethostname()}, {warning}")
    leave_binding_to_tutti()
    if share.cores and works:
        os.sched_setaffinity(0, share.cores[context.local_rank])
    threads = share.threads if works else 1
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    return threads


def workers_here(rank: int, local_size: int, hosts: Sequence[tuple[int, int]]) -> int:
    """Return the number of workers among the ranks of a rank's host; the last ones are servers.

    Args:
        rank: the rank, in the job.
        local_size: how many ranks its host has.
        hosts: for each host how many workers, and how many ranks in all, it was to get.

    Returns:
        All of them, if the ranks were not placed host after host.
    """
    first = 0
    for workers, ranks in hosts:
        if first <= rank < first + ranks and ranks == local_size:
            return workers
        first += ranks
    return local_size


if __name__ == "__main__":
    main()
