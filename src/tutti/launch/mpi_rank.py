"""The program of a rank that `run_on_hosts` starts: `python -m tutti.launch.mpi_rank`."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import TracebackType
from typing import TYPE_CHECKING, Final

from tutti.comm.shm.memfd import FileAddress
from tutti.errors import PeerLost, UserError
from tutti.launch.cores import allowed_cores, leave_binding_to_tutti
from tutti.launch.exit_reports import done, failure, without_launcher
from tutti.launch.hangs import print_stacks
from tutti.launch.launcher import started_by
from tutti.launch.liveness import DONE, FAILED, LivenessAddress, LivenessConnection, connect
from tutti.launch.mpirun_channel import Address, RankStarted
from tutti.launch.orphans import end_at_once, end_with_daemon, follow, follow_launcher, mpi_segments
from tutti.launch.placement import share_host
from tutti.launch.stop_request import StopPage, be_supervised
from tutti.launch.witness import be_witnessed
from tutti.launch.world import end_mpi_job, end_ranks, join
from tutti.terminal import lasting_output, say_last

if TYPE_CHECKING:
    from tutti.comm.base import Communicator

START: Final = "TUTTI_MPI_START"
"""The environment variable with a pickled `MpiStart`, in base64."""


@dataclass(frozen=True)
class MpiStart:
    """The job of the ranks under mpirun.

    Attributes:
        entry: the function to run, as "package.module:function".
        threads: how many threads each worker may use; None: its share of its host's cores.
        payload: the payload when it is small enough to travel here, else None.
        address: where the payload is and reports go, for ranks on the host of the process that ran mpirun.
        path: `sys.path` of that process.
        arguments: `sys.argv` of that process.
        start_s: how long MPI may take to start.
        stop: its file of the `StopPage`.
        liveness: where it listens to whether the ranks live.
        hosts: for each host the number of its workers, and of all its ranks.
        goes_on: others take over from lost ranks, as which those count that the process does not hear of.
    """

    entry: str
    threads: int | None
    payload: bytes | None
    address: Address
    path: list[str]
    arguments: list[str]
    start_s: int
    stop: FileAddress
    liveness: LivenessAddress
    hosts: Sequence[tuple[int, int]] = ()
    goes_on: bool = False


FAREWELL_S: Final = 1.0
"""Time of the last words of a rank to reach mpirun."""


def main() -> None:
    """Be a rank of an MPI job, as the environment says."""
    start: MpiStart = pickle.loads(base64.urlsafe_b64decode(os.environ.pop(START)))
    follow_launcher()
    here = start.address.is_here()
    if here:
        follow([start.address.process])
    # Once it has connected, a request to stop may come.
    be_supervised(None)
    connection = connect(start.liveness, started_by().rank)
    # On the first host mpirun itself has started it, and is ended by the process that ran it.
    end = end_at_once if here else end_with_daemon
    if connection is not None:
        be_witnessed(connection, end)
        connection.end_when_lost(end)
    elif start.goes_on and not here:
        _say_unreachable(start.liveness)
        end()
    if here:
        be_supervised(_stop_page(start.stop))
    sys.path += [folder for folder in start.path if folder not in sys.path]
    sys.argv[:] = start.arguments
    with lasting_output():
        try:
            _run(start, connection)
        except BaseException as error:
            _fail(start, connection, error, without_launcher(error.__traceback__))


def _say_unreachable(address: LivenessAddress) -> None:
    """Say that the launching process cannot be reached; it may be that nobody hears that."""
    where = f"port {address.port} of {', '.join(address.hosts)}"
    say_last(f"tutti: error: host {socket.gethostname()} cannot reach {where}: is there a firewall?\n")
    time.sleep(FAREWELL_S)


def _stop_page(address: FileAddress) -> StopPage:
    file = address.open()
    try:
        return StopPage(file)
    finally:
        os.close(file)


def _run(start: MpiStart, connection: LivenessConnection | None) -> None:
    threads = _set_up_process(start)
    # By the kernel: MPI holds the interpreter's lock while it starts.
    signal.alarm(start.start_s)
    comm = join(threads)
    from tutti.comm.blocking import BlockingCommunicator  # It needs torch, which `join` has imported.

    signal.alarm(0)
    start.address.send(RankStarted(comm.rank, mpi_segments()))
    entry = resolve_name(start.entry)  # It imports what takes long.
    if connection is not None and isinstance(comm, BlockingCommunicator):
        connection.give_signs(comm.peers.course, print_stacks)
    value = entry(comm, _payload(start, comm))
    if comm.rank == 0:
        start.address.send(done(comm.rank, value))
    if connection is not None:
        connection.leave(DONE)
    comm.close()


def _set_up_process(start: MpiStart) -> int | None:
    """Bind this process to its share of the host's cores; returns how many threads it may use."""
    context = started_by()
    if context.local_rank is None or context.local_size is None:
        return start.threads
    workers = workers_here(context.rank, context.local_size, start.hosts)
    share = share_host(allowed_cores(), workers, start.threads)
    works = context.local_rank < workers
    if context.local_rank == 0:
        for warning in share.warnings:
            print(f"tutti: warning: on {socket.gethostname()}, {warning}", file=sys.stderr, flush=True)
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


def _payload(start: MpiStart, comm: Communicator) -> bytes:
    """Return the payload, which rank 0 broadcasts."""
    content: bytes | None = None
    if comm.rank == 0:
        content = start.address.payload_here() if start.payload is None else start.payload
        if content is None:
            raise UserError(
                "what is to be trained is too large to be handed to the first host, another machine; "
                "start on that host, or give model and data by name instead of as objects"
            )
    given = comm.broadcast_object(content)
    assert isinstance(given, bytes)
    return given


def _fail(
    start: MpiStart,
    connection: LivenessConnection | None,
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    """Report the exception to the process that ran mpirun, or else say it here; end the job."""
    if connection is not None:
        connection.leave(DONE if isinstance(error, PeerLost) else FAILED)
    report = failure(started_by().rank, error, frames)
    if start.address.send(report):
        say_last("")
        end_ranks(error.exit_code if isinstance(error, UserError) else 1)
    end_mpi_job(error, frames)


if __name__ == "__main__":
    main()
