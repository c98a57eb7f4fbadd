"""The end of a rank of an MPI job with its launcher, even when that is killed with SIGKILL.

    mpirun ── (prted, or a shell) ── rank: a thread that sleeps until one of them is gone

MPI itself notices it after seconds, or in a rank that computes not at all, and leaves the shared memory that
it has made. So the thread removes what the rank has mapped, and ends what it has started, and the rank.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tutti.errors import UserError
from tutti.launch.surroundings import mpi_place

LAUNCHERS: Final = (
    *("mpirun", "mpiexec", "prterun", "prte", "prted", "orterun", "orted"),
    *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "srun", "slurmstepd"),
)
"""The programs that start ranks, on the first host and on others, as the kernel names them."""

_NAME_BYTES: Final = 15

_followed: set[int] = set()


def follow_launcher() -> None:
    """In a rank of an MPI job, end soon after the launcher is gone. `import tutti` sees to it."""
    try:
        if mpi_place(os.environ) is None:
            return
    except UserError:
        # Whoever starts something in parallel is told.
        return
    known = {name[:_NAME_BYTES] for name in LAUNCHERS}
    ancestors = list(_ancestors())
    last = max((place for place, (_, name) in enumerate(ancestors) if name in known), default=-1)
    # A shell between the launcher and the rank counts too: without it the rank is no descendant any more.
    follow([process for process, _ in ancestors[: last + 1]])


def follow(processes: Sequence[int]) -> None:
    """End this process, and what it has started, soon after one of `processes` is gone."""
    wanted = [process for process in processes if process not in _followed]
    if not wanted:
        return
    _followed.update(wanted)
    threading.Thread(target=_wait, args=(wanted,), name="tutti-launcher", daemon=True).start()


def _wait(processes: Sequence[int]) -> None:
    _end(_first_gone(processes))


def _first_gone(processes: Sequence[int]) -> int:
    """Return when one of them is gone: which."""
    poll, followed = select.poll(), {}
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return process
        followed[descriptor] = process
        poll.register(descriptor, select.POLLIN)
    return followed[poll.poll()[0][0]]


def _end(gone: int) -> None:
    """Leave nothing behind, and no process."""
    for segment in mpi_segments():
        Path(segment).unlink(missing_ok=True)
    remove_session(gone)
    for process in _descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def mpi_segments() -> tuple[str, ...]:
    """The shared-memory files that the MPI library has mapped here."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/sm_segment" in line}
    return tuple(file for file in files if not file.endswith("(deleted)"))


def remove_session(launcher: int) -> None:
    """Remove the folder that Open MPI's launcher, a process that was killed, has left."""
    import shutil  # `import tutti` imports this module, and is to be quick.
    import tempfile

    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{launcher}"), ignore_errors=True)


def _ancestors() -> Iterator[tuple[int, str]]:
    """The parent of this process, its parent, and so on: their numbers and names."""
    process = os.getppid()
    while process > 1:
        found = _stat(process)
        if found is None:
            return
        name, parent = found
        yield process, name
        process = parent


def _descendants(ancestor: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (found := _stat(int(folder.name))) is not None:
            parents[int(folder.name)] = found[1]
    found_so_far = {ancestor}
    while more := {process for process, parent in parents.items() if parent in found_so_far} - found_so_far:
        found_so_far |= more
    return sorted(found_so_far - {ancestor})


def _stat(process: int) -> tuple[str, int] | None:
    """The name of a process and its parent; None when it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, int(rest.split()[1])
