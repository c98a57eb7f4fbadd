"""The communicator of this process, for programs started by any launcher, or none."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

from tutti.errors import PeerLost, TuttiError, says_all
from tutti.launch.launcher import LaunchContext, Launcher, ends_with_a_rank, started_by
from tutti.launch.mpi_library import Stranger
from tutti.launch.orphans import follow_launcher, mpi_segments, refuse_ended_launcher
from tutti.launch.runtime_settings import keep_memory
from tutti.terminal import say_last

if TYPE_CHECKING:
    from tutti.comm.base import Communicator
    from tutti.launch.cores import Cores

_STAGGER_S = 0.25
"""The additional wait of each rank, after the one before it, before it prints a mistake of the user's."""

_CAUSE_S = 1.0
"""The longest wait of a rank before it prints what others may have printed."""

_world: Communicator | None = None


def adopt(comm: Communicator) -> None:
    """Make `comm` the communicator of this process: what `join` returns."""
    global _world
    _world = comm


def join(threads: int | None = None) -> Communicator:
    """Return the communicator of all ranks of this job, made at the first call.

    Started by mpirun, srun or torchrun, these are the ranks of that job, torch gets this rank's share of the
    host's cores as threads, and from now on an uncaught exception in any rank prints its traceback and ends
    the whole job, so that nothing hangs. Started by tutti, they are the ranks that it started. Otherwise
    this is a world of one.
    """
    global _world
    if _world is None and started_by().given:
        _world = _join_given(threads)
    elif _world is None:
        from tutti.comm.shm.communicator import HostCommunicator

        _world = HostCommunicator.alone()
    return _world


def _join_given(threads: int | None) -> Communicator:
    """Return the communicator of the ranks that the user's launcher has started."""
    import torch

    from tutti.launch.busy_cores import CoreWatch
    from tutti.launch.cores import allowed_cores, share_of

    _end_job_on_exceptions()
    refuse_stranger()
    keep_memory()
    context = started_by()
    comm: Communicator
    if context.launcher is Launcher.TORCHRUN:
        from tutti.torch_backend.rendezvous import join_by_store

        comm = join_by_store(context.rank, context.size)
    else:
        from tutti.comm.mpi.communicator import MpiCommunicator

        comm = MpiCommunicator.world()
    _leave_at_exit(comm)
    here = cast("list[Cores]", comm.node.all_gather_objects(allowed_cores()))
    threads = threads or share_of(comm.node.rank, here)
    torch.set_num_threads(threads)
    CoreWatch(threads)
    return comm


def refuse_stranger() -> None:
    """Refuse a launcher that has ended, or belongs to another MPI library (initialises MPI). No torch."""
    from tutti.comm.mpi.library import world_place

    context = started_by()
    if not context.mpi:
        return
    refuse_ended_launcher(os.environ)
    follow_launcher()
    _, seen, _ = world_place()
    if seen == context.size:
        return
    error = Stranger(_stranger(context, seen))
    if seen == 1:
        leave_world_of_one()
    raise error


def leave_world_of_one() -> None:
    """Leave MPI, as its only rank, and remove its shared memory: Open MPI forgets that there."""
    from tutti.comm.mpi.library import finalize

    segments = mpi_segments()
    finalize()
    for segment in segments:
        Path(segment).unlink(missing_ok=True)


def _stranger(context: LaunchContext, seen: int) -> str:
    from tutti.comm.mpi.library import library, library_file

    text = f"{context.launcher.value} started {context.size} ranks, but MPI sees {seen}"
    if context.launcher is Launcher.SRUN:
        return (
            f"{text}: srun has not told {library()} of the others. Try 'srun --mpi=pmix' ('srun --mpi=list' "
            "shows what there is), or leave srun out and have mpirun start the ranks of the allocation: "
            "--hosts slurm"
        )
    return (
        f"{text}: it is not the launcher of {library()}, which mpi4py uses ({library_file()}). Start the "
        "ranks with that library's mpirun, or have mpi4py use the launcher's library: MPI4PY_LIBMPI=FILE"
    )


def _end_job_on_exceptions() -> None:
    """Make an uncaught exception end all ranks of the job, so that none waits for this one."""
    own, usual = os.getpid(), sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == own:
            end_mpi_job(error, trace)
        else:
            usual(kind, error, trace)

    sys.excepthook = end_job


def _leave_at_exit(comm: Communicator) -> None:
    """Inform the other ranks, when the program ends, that this one has left. MPI ends with all ranks."""
    own = os.getpid()

    def leave() -> None:
        if os.getpid() == own:
            comm.close()

    atexit.register(leave)


def end_mpi_job(error: BaseException, trace: TracebackType | None) -> NoReturn:
    """Print the error as the job's last output, and end all its ranks."""
    rank, code = started_by().rank, 1
    try:
        if says_all(error):
            # Usually all ranks find the same mistake at the same time: the first to print ends the others.
            # A lost peer is a consequence: its own error comes first. Ranks that do not see each other
            # cannot end each other, and leave it to the first one.
            code = cast("TuttiError", error).exit_code
            silent = rank > 0 and isinstance(error, Stranger) and not ends_with_a_rank(os.environ)
            late = silent or isinstance(error, PeerLost)
            time.sleep(_CAUSE_S if late else min(_CAUSE_S, _STAGGER_S * rank))
            if not silent:
                say_last(f"tutti: error: {error}\n")
        else:
            text = "".join(traceback.format_exception(type(error), error, trace))
            say_last(f"rank {rank} failed:\n{text}\n")
    finally:
        end_ranks(code)


def end_ranks(code: int) -> NoReturn:
    """End all ranks of the MPI job, this one at once, with an exit code other than 0."""
    if not ends_with_a_rank(os.environ):
        from tutti.comm.mpi.library import abort

        # Where MPI cannot be loaded, no rank waits for another, and each says so.
        with suppress(ImportError):
            abort(code)
    # Open MPI's page about MPI_Abort would hide earlier messages.
    os._exit(code)
