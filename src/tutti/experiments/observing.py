"""What a run leaves in its folder while it goes on, for those who watch it from outside."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import cast

from tutti.comm.base import Communicator
from tutti.launch.sampling import Sampler
from tutti.training.run_folder import CONFIG, RunFolder
from tutti.usage import usage_file


def crew_of(team: Communicator) -> Communicator:
    """All ranks of the job, the workers first, with the numbers that they have among the workers."""
    return team if team.servers is None else team.servers.comm


def seen_folder(comm: Communicator, folder: RunFolder | None) -> Path | None:
    """The run folder as this rank sees it (collective).

    Args:
        comm: the workers.
        folder: that rank 0 has made, with the configuration in it; None elsewhere.

    Returns:
        The folder; None on a host that does not see it.
    """
    path = folder.path.absolute() if folder is not None else None
    given = comm.broadcast_object(None if path is None else (str(path), _mark(path)))
    if given is None:
        return None
    name, mark = cast("tuple[str, tuple[int, ...]]", given)
    with suppress(OSError):
        # Another host may have a folder of the same name, left by an earlier run.
        return Path(name) if _mark(Path(name)) == mark else None
    return None


def begin_sampling(comm: Communicator, folder: Path | None, sampler: Sampler | None) -> None:
    """Have this host's cores and memory sampled into the run folder, if it is seen here (collective).

    Args:
        comm: the workers.
        folder: what `seen_folder` gave.
        sampler: of this host, on one of its ranks.
    """
    host = socket.gethostname()
    first = comm.broadcast_object(host)
    if sampler is not None and folder is not None:
        sampler.begin(usage_file(folder, None if host == first else host))


def _mark(folder: Path) -> tuple[int, ...]:
    """What tells the configuration in `folder` from any other file of that name, on whichever host."""
    found = os.stat(folder / CONFIG)
    return found.st_mtime_ns, found.st_size, found.st_ino
