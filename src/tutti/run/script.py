"""A user's own program on several ranks; it finds the others with `tutti.init`. Needs no torch."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tutti.comm.shm.memfd import make_for_all
from tutti.errors import EXIT_INTERRUPTED, BadOption
from tutti.launch.launcher import LaunchContext, started_by
from tutti.launch.leaving import finish_program
from tutti.launch.placement import place_ranks
from tutti.launch.rendezvous import LOOPBACK, reserved_port, set_rendezvous_file, variables
from tutti.launch.start import start
from tutti.run.start import announce

if TYPE_CHECKING:
    from tutti.comm.base import Communicator


def run_program(
    program: str, arguments: list[str], workers: str, threads: int | None, hosts: str | None
) -> int:
    """Run a Python file on every rank; return 0, or the exit code of a program stopped on request."""
    path = Path(program)
    if not path.is_file():
        raise BadOption(f"there is no program {program}; give the path of a Python file")
    payload = json.dumps([str(path.resolve()), arguments]).encode()
    placement = place_ranks(workers, threads, hosts=hosts)
    result = start("tutti.run.script:work", payload, placement, announce=_announce)
    return cast("int | None", result) or 0


def _announce(line: str) -> None:
    """Print to stderr alone: standard output is the program's, and may be piped."""
    with redirect_stdout(sys.stderr):
        announce(line)


def work(comm: Communicator, payload: bytes) -> int:
    """Run the program in this process (entry point of the ranks); return 0 or `EXIT_INTERRUPTED`."""
    from tutti.launch.world import adopt

    path, arguments = json.loads(payload)
    adopt(comm)
    with _torch_variables(comm) as variables_of_torch:
        os.environ.update(variables_of_torch)
        if comm.hosts == 1:
            set_rendezvous_file(make_for_all("store", comm))
        sys.argv[:] = [path, *arguments]
        sys.path.insert(0, str(Path(path).parent))
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0, EXIT_INTERRUPTED):
                raise
            code = leaving.code or 0
        if comm.size > 1:
            # A single rank is the caller's process, which continues.
            finish_program()
        return code


@contextmanager
def _torch_variables(comm: Communicator) -> Iterator[dict[str, str]]:
    """Yield the variables for torch.distributed; the port is reserved inside the context (collective)."""
    own, interface = (LOOPBACK, LOOPBACK) if comm.hosts == 1 else (socket.gethostname(), "")
    with reserved_port(interface) if comm.rank == 0 else nullcontext() as free:
        address, port = cast("tuple[str, int]", comm.broadcast_object((own, free)))
        place = LaunchContext(started_by().launcher, comm.rank, comm.size, comm.node.rank, comm.node.size)
        yield variables(place, address, port)
