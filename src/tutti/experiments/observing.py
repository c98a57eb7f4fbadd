"""What a run leaves in its folder while it goes on, for those who watch it from outside."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from tutti.comm.base import Communicator
from tutti.launch.sampling import Sampler
from tutti.training.heart import Heart
from tutti.training.run_folder import CONFIG, RunFolder
from tutti.usage import usage_file


def crew_of(team: Communicator) -> Communicator:
    """All ranks of the job, the workers first, with the numbers that they have among the workers."""
    return team if team.servers is None else team.servers.comm


@contextmanager
def observed(
    comm: Communicator, folder: RunFolder | None, sampler: Sampler | None, wanted: bool
) -> Iterator[Heart]:
    """Have cores and memory sampled into the run folder, and leave signs of life there (collective).

    Args:
        comm: the workers.
        folder: what rank 0 has made, with the configuration in it; None elsewhere.
        sampler: of this host, on one of its ranks.
        wanted: whether there is a run folder; the same on all ranks.

    Yields:
        What leaves this rank's signs. On a host that does not see the folder there are none, and no samples.
    """
    seen = _seen(comm, folder) if wanted else None
    host = socket.gethostname()
    first = comm.broadcast_object(host) if wanted else None
    if sampler is not None and seen is not None:
        sampler.begin(usage_file(seen, None if host == first else host))
    with Heart(seen, comm.rank) as heart:
        yield heart


def _seen(comm: Communicator, folder: RunFolder | None) -> Path | None:
    """The run folder as this rank sees it, if it does (collective)."""
    path = folder.path.absolute() if folder is not None else None
    given = comm.broadcast_object(None if path is None else (str(path), _mark(path)))
    if path is not None:
        return path
    name, mark = cast("tuple[str, tuple[int, ...]]", given)
    with suppress(OSError):
        # Another host may have a folder of the same name, left by an earlier run.
        return Path(name) if _mark(Path(name)) == mark else None
    return None


def _mark(folder: Path) -> tuple[int, ...]:
    """What tells the configuration in `folder` from any other file of that name, on whichever host."""
    found = os.stat(folder / CONFIG)
    return found.st_mtime_ns, found.st_size, found.st_ino
