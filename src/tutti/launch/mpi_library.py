"""The MPI library of the launcher that started this process; mpi4py would take its environment's own.

    /usr/bin/mpirun ──► rank: mpi4py ──► .venv/lib/libmpi.so.40     the wheel's, which knows another launcher
                                    └──► /usr/lib/.../libmpi.so.40  the launcher's own

No torch, no MPI.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Final

from tutti.errors import UserError

MPICH: Final = ("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy")
OPEN_MPI: Final = ("mpirun", "mpiexec", "prterun", "prte", "prted", "orterun", "orted")

CHOSEN: Final = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")
"""The variables by which a user says which library, or which kind, mpi4py is to load."""


class Stranger(UserError):
    """The MPI library does not belong to the launcher: all ranks see that, and none can inform the others."""


SEGMENT_BYTES: Final = 16 << 20
"""The shared memory that Open MPI makes for each rank, although it looks for room for one only."""

SHARED_MEMORY: Final = Path("/dev/shm")

_FOLDERS_OF_SEGMENTS: Final = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Open MPI's settings for that folder, in version 5 and before."""


def make_room(ranks: int, environ: MutableMapping[str, str]) -> None:
    """Make Open MPI put its shared memory into the temporary folder if /dev/shm has no room for it.

    Docker gives a container 64 MiB by default: MPI would not start, or end by SIGBUS.
    """
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return
    if room.f_bavail * room.f_frsize < ranks * SEGMENT_BYTES:
        for name in _FOLDERS_OF_SEGMENTS:
            environ.setdefault(name, tempfile.gettempdir())


def give_home(environ: MutableMapping[str, str]) -> None:
    """Name the user's home, without which Open MPI does not start; services and containers may have none."""
    home = os.path.expanduser("~")
    environ.setdefault("HOME", home if os.path.isabs(home) else "/")


def use_library_of(launchers: Sequence[tuple[int, str]], environ: MutableMapping[str, str]) -> None:
    """Make mpi4py load the library of the nearest launcher, if that is not this environment's own."""
    if any(name in environ for name in CHOSEN):
        return
    for process, name in launchers:
        if name not in (*MPICH, *OPEN_MPI):
            continue
        try:
            program = Path(os.readlink(f"/proc/{process}/exe"))
        except OSError:
            continue
        library = library_beside(program, mpich=program.name in MPICH)
        if library is not None:
            environ[CHOSEN[0]] = str(library)
        return


def library_beside(program: Path, mpich: bool) -> Path | None:
    """Return the MPI library of a launcher; None if it is this environment's own, or not found."""
    prefix = program.parent.parent
    if prefix == Path(sys.prefix).resolve():
        return None
    name = "libmpi.so.12" if mpich else "libmpi.so.40"
    files = (folder / name for folder in _folders(prefix))
    return next((file for file in files if file.is_file()), None)


def _folders(prefix: Path) -> Iterator[Path]:
    """Yield the places of libraries under a prefix: as built, as in Debian, as in Red Hat."""
    for lib in (prefix / "lib", prefix / "lib64"):
        yield lib
        yield from sorted(lib.glob("*-linux-gnu*"))
        yield from (lib / "openmpi" / "lib", lib / "mpich" / "lib")
