"""Running a function on the ranks of a placement, wherever they are. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final

from tutti.errors import UserError
from tutti.launch.exit_reports import without_launcher
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement
from tutti.launch.world import end_mpi_job, join, refuse_stranger
from tutti.terminal import IMPORTING, wait_shown

if TYPE_CHECKING:
    from tutti.launch.supervisor import Recovery

ONE_AT_A_TIME: Final = threading.RLock()
"""Held by the thread that is a rank: random generators and torch's settings are those of the process."""


def start(
    entry: str,  # "package.module:function"; each rank calls function(comm, payload)
    payload: bytes,
    placement: Placement,
    *,
    announce: Callable[[str], None] | None = None,  # gets the placement and its warnings, on rank 0 alone
    hang_timeout_s: float | None = None,  # the time in which each rank has to make a step; None: any
    recovery: Recovery | None = None,  # None: the loss of a rank ends the job
    in_process: bool = True,  # run a single rank in this process
) -> object:
    """Run `entry` on every rank of the placement; return the result of rank 0, or on a rank its own.

    A single rank runs in this process; others are processes under a supervisor, or under mpirun if the
    placement names hosts. A process that is a rank of the user's mpirun calls the function in place.

    Raises:
        Replaced: `recovery` ended the ranks.
        UserError: a rank found that the input is wrong.
        RankFailed: a rank of several raised another exception, which a single worker raises unchanged.
        PeerLost: a rank was killed, or exited before it was done.
        KeyboardInterrupt: Ctrl-C, after all ranks are gone.
        SystemExit: SIGTERM or SIGHUP, after all ranks are gone.
    """
    context = started_by()
    if context.launcher is Launcher.TUTTI:
        return resolve_name(entry)(join(), payload)
    if context.given:
        return _in_mpi_job(entry, payload, placement, announce)
    if announce is not None:
        for line in (placement.describe(), *(f"warning: {text}" for text in placement.warnings)):
            announce(line)
    if placement.hosts:
        from tutti.launch.ranks_on_hosts import run_on_hosts

        return run_on_hosts(entry, payload, placement, hang_timeout_s=hang_timeout_s, recovery=recovery)
    if placement.ranks == 1 and recovery is None and in_process:
        return _alone(entry, payload, placement)
    from tutti.launch.supervisor import supervise

    return supervise(entry, payload, placement, hang_timeout_s=hang_timeout_s, recovery=recovery)


def _alone(entry: str, payload: bytes, placement: Placement) -> object:
    """Run in this process, which keeps its number of threads afterwards."""
    with wait_shown(IMPORTING):
        import torch

        from tutti.comm.shm.communicator import HostCommunicator
        from tutti.launch.busy_cores import CoreWatch

    with ONE_AT_A_TIME:
        before = torch.get_num_threads()
        torch.set_num_threads(placement.threads or before)
        watch = CoreWatch(placement.threads or before)
        comm = HostCommunicator.alone()
        try:
            return resolve_name(entry)(comm, payload)
        finally:
            comm.close()
            watch.end()
            torch.set_num_threads(before)


def _in_mpi_job(
    entry: str, payload: bytes, placement: Placement, announce: Callable[[str], None] | None
) -> object:
    """Run as a rank of the user's MPI job; a failure ends the whole job, so that no rank hangs."""
    try:
        refuse_stranger()
    except UserError as error:
        end_mpi_job(error, None)
    import torch  # It takes seconds.

    comm = join(placement.threads)
    if announce is not None and comm.rank == 0:
        announce(replace(placement, threads=torch.get_num_threads()).describe())
    try:
        return resolve_name(entry)(comm, payload)
    except BaseException as error:
        end_mpi_job(error, without_launcher(error.__traceback__))
