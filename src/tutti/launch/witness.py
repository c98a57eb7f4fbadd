"""The witness of a rank that mpirun starts: its parent on the same host, which tells by what it has ended.

    mpirun ── daemon of the host ── witness ── rank
                                       └── the rank's connection to the launching process: its exit code

mpirun tells it, too, but only once all other ranks have ended, half a second later. The witness notices as
well when the launching process is gone, or cut off, while MPI starts in the rank and no Python runs there.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import warnings
from collections.abc import Callable
from typing import Final, NoReturn

from tutti.launch.liveness import LivenessConnection
from tutti.launch.orphans import die_with_parent

_SENT: Final = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGPIPE, signal.SIGTSTP, signal.SIGXCPU, signal.SIGWINCH),
)
"""The signals that a launcher or a scheduler may send to all processes of a rank."""


def be_witnessed(connection: LivenessConnection, end: Callable[[], None]) -> None:
    """Go on in a child of this process, which waits for the child's end, tells of it, and ends as it did.

    Where no more processes may be started there is no witness, and mpirun alone tells.

    Args:
        connection: of the rank. It is open until the witness has told.
        end: called in the witness when the launching process is gone: ends it, and the rank.
    """
    witness = os.getpid()
    # mpirun sends its signals to all processes of a rank, and they are the rank's. (A mask would be that of
    # one thread.)
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _SENT}
    with warnings.catch_warnings():
        # From 3.12 on Python warns of threads: the one that is here only waits for the end of the launcher.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            rank: int | None = os.fork()
        except OSError:
            rank = None
    if rank == 0:
        die_with_parent(witness)
    if not rank:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        return
    if not _outlasts(connection, rank):
        end()
    returncode = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    connection.tell_end(returncode)
    _end_as(returncode)


def _outlasts(connection: LivenessConnection, rank: int) -> bool:
    """Wait for the end of a connection, or of the rank; tell whether the rank has ended."""
    ended = os.pidfd_open(rank)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    # What comes is for the rank.
    poll.register(connection.fileno(), select.POLLRDHUP)
    return ended in dict(poll.poll())


def _end_as(returncode: int) -> NoReturn:
    """End with that exit code, or by the signal that is minus it."""
    if returncode < 0:
        signum = -returncode
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The rank has left one, if it was to.
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(abs(returncode))
