"""The program of a rank that `run_on_hosts` starts: `python -m tutti.launch.mpi_rank`."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import sys
from pkgutil import resolve_name
from typing import Final

from tutti.errors import UserError
from tutti.launch.cores import allowed_cores, leave_binding_to_tutti
from tutti.launch.exit_reports import done, failure, without_launcher
from tutti.launch.launcher import started_by
from tutti.launch.orphans import end_at_once, follow_launcher, mpi_segments
from tutti.launch.placement import share_host
from tutti.launch.rank_connections import LauncherAddress, LauncherConnection, Started, Stoppable, connect
from tutti.launch.stop_request import StopPage, be_supervised
from tutti.launch.world import end_ranks, join
from tutti.terminal import lasting_output, say_last, warn_on_stderr

START: Final = "TUTTI_MPI_START"
"""The environment variable with a pickled `LauncherAddress`, in base64."""

START_S: Final = 300
"""Seconds that MPI may take to start in a rank: it may wait for ever for a dead rank."""


def main() -> None:
    """Be a rank of an MPI job, as the environment says."""
    address: LauncherAddress = pickle.loads(base64.urlsafe_b64decode(os.environ.pop(START)))
    follow_launcher()
    page = StopPage()
    be_supervised(page)
    connection = connect(address, started_by().rank)
    if connection is None:
        where = f"port {address.port} of {', '.join(address.hosts)}"
        say_last(f"tutti: error: host {socket.gethostname()} cannot reach {where}: is there a firewall?\n")
        os._exit(1)
    page.on_stoppable = lambda value: connection.send(Stoppable(value))
    connection.watch(page, end_at_once)
    sys.path += [folder for folder in connection.job.path if folder not in sys.path]
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
    threads = _set_up_process(job.workers, job.threads)
    # By the kernel: MPI holds the interpreter's lock while it starts.
    signal.alarm(START_S)
    comm = join(threads)
    from tutti.comm.blocking import BlockingCommunicator  # It needs torch, which `join` has imported.

    signal.alarm(0)
    connection.send(Started(mpi_segments()))
    entry = resolve_name(job.entry)  # Its imports take long.
    if isinstance(comm, BlockingCommunicator):
        connection.status = comm.peers.status
    payload = comm.broadcast_object(job.payload)
    connection.leave(done(comm.rank, entry(comm, payload)))
    comm.close()


def _set_up_process(workers: int, threads: int | None) -> int | None:
    """Bind this process to its share of the host's cores; return the number of threads it may use."""
    context = started_by()
    if context.local_rank is None or context.local_size is None:
        return threads
    # mpirun starts the ranks host after host; the last ones are servers.
    here = min(context.local_size, workers - context.rank + context.local_rank)
    share = share_host(allowed_cores(), max(1, here), threads)
    works = context.local_rank < here
    if context.local_rank == 0:
        for warning in share.warnings:
            warn_on_stderr(f"on {socket.gethostname()}, {warning}")
    leave_binding_to_tutti()
    if share.cores and works:
        os.sched_setaffinity(0, share.cores[context.local_rank])
    threads = share.threads if works else 1
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    return threads


if __name__ == "__main__":
    main()
