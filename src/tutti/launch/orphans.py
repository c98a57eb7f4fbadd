"""Processes that end with their parent or their launcher, even when that is killed with SIGKILL.

    mpirun ── (prted, or a shell) ── rank: a thread that sleeps until one of them is gone

MPI itself notices the end after seconds, or not at all in a rank that computes, and leaves its shared memory
behind. So the thread removes the rank's files, and ends its children and the rank. The rank starts the thread
when it joins its job; an import does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tutti.errors import UserError
from tutti.launch.launcher import mpi_place
from tutti.launch.mpi_library import MPICH, OPEN_MPI, make_room, use_library_of

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, the process `parent`, is gone.

    The kernel counts the *thread* that started this process as its parent, so that thread must stay.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call above: then no signal would ever come. A process without its
    # parent has another one (init, or a subreaper), so that the numbers differ.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


LAUNCHERS: Final = (*OPEN_MPI, *MPICH, "srun", "slurmstepd")
"""The programs that start ranks, on the first host and on others, as the kernel names them."""

ANSWER_S: Final = 2.0
"""Time of a launcher to accept a connection, after which it counts as there, but busy."""

_followed: set[int] = set()


def follow_launcher() -> None:
    """In a rank of an MPI job, take the launcher's MPI library, and end soon after the launcher ends."""
    try:
        place = mpi_place(os.environ)
    except UserError:
        # `init` raises it; a program that uses only torch.distributed does not need it.
        return
    if place is None:
        return
    make_room(place.local_size or 1, os.environ)
    import psutil  # The supervisor imports this module, and is to start soon.

    ancestors: list[tuple[int, str]] = []
    with suppress(psutil.NoSuchProcess):
        ancestors += ((process.pid, _called(process)) for process in psutil.Process().parents())
    use_library_of(ancestors, os.environ)
    last = max((place for place, (_, name) in enumerate(ancestors) if name in LAUNCHERS), default=-1)
    # A shell between the launcher and the rank counts too: without it the rank is no descendant any more.
    follow([process for process, _ in ancestors[: last + 1]])


def refuse_ended_launcher(environ: Mapping[str, str]) -> None:
    """Refuse to be a rank of a job whose launcher has ended: its variables may be a shell's (tmux, nohup)."""
    uris = {value for name, value in environ.items() if name.startswith("PMIX_SERVER_URI")}
    places = [place for uri in uris if (place := uri.partition(";tcp4://")[2])]
    for place in places:
        host, _, port = place.partition(":")
        with socket.socket() as connection:
            connection.settimeout(ANSWER_S)
            if connection.connect_ex((host, int(port))) != errno.ECONNREFUSED:
                return
    if not places:
        return
    raise UserError(
        "this process has the variables of an mpirun (OMPI_*, PMIX_*) that has ended; start it with mpirun, "
        "or in a shell without them: unset ${!OMPI_*} ${!PMIX_*} ${!PRTE_*}"
    )


def _called(process: psutil.Process) -> str:
    """Return the name of the program's file if it is a launcher (Debian's are links), else of the process."""
    with suppress(OSError):  # Another user's process, or one that has ended.
        file = os.path.basename(os.readlink(f"/proc/{process.pid}/exe"))
        if file in LAUNCHERS:
            return file
    return process.name()


def follow(processes: Sequence[int]) -> None:
    """End this process and its children soon after one of `processes` is gone."""
    wanted = [process for process in processes if process not in _followed]
    if not wanted:
        return
    _followed.update(wanted)
    threading.Thread(target=_end_after_one_of, args=(wanted,), name="tutti-launcher", daemon=True).start()


def _end_after_one_of(processes: Sequence[int]) -> None:
    # A descriptor of a process stands for that process, even if its number is given to another one later.
    poll = select.poll()
    with suppress(ProcessLookupError):
        for process in processes:
            poll.register(os.pidfd_open(process), select.POLLIN)
        poll.poll()
    end_at_once()


def end_at_once() -> None:
    """Remove this rank's files, and end its processes and itself."""
    import psutil

    started = psutil.Process().children(recursive=True)
    # Files first, as nothing runs after the last line. By SIGKILL: handlers and `atexit` might wait for MPI.
    for segment in mpi_segments():
        Path(segment).unlink(missing_ok=True)
    remove_session(Path(os.environ.get("PMIX_SERVER_TMPDIR", "")))
    for one in started:
        with suppress(psutil.Error):
            one.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def mpi_segments() -> tuple[str, ...]:
    """Return the shared-memory files that the MPI library has mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "/sm_segment." in line}
    return tuple(file for file in files if not file.endswith("(deleted)"))


def remove_session(folder: Path) -> None:
    """Remove the folder of Open MPI's launcher, or of its daemon on another host, after it was killed."""
    if folder.name.startswith(("ompi.", "prted.")):
        shutil.rmtree(folder, ignore_errors=True)
