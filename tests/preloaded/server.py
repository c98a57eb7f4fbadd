"""Forks a process for each stub that asks: python -m tests.preloaded.server SOCKET MODULE...

The modules are imported besides those that all ranks import.

It says "ready" when it listens, and ends, with all programs, when its standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tutti.launch.leaving import prepare_fork

PRELOADED = (
    # torch imports its compiler when the first optimizer is made, which takes seconds in every process.
    "torch._dynamo",
    # The first model that is compiled imports this, with 380 modules.
    "functorch.compile",
    # Ranks that share a model import these.
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    # The loops of examples learn its digits.
    "sklearn.datasets",
    "pytest",
    "tutti.torch_backend.group",
    "tutti.comm.shm.communicator",
    "tutti.run.train",
)
OF_STUDIES = ("tutti.studies.search.study", "tutti.reports.figures.base")
"""What searches and cross-validations import besides, with scikit-learn, pandas, optuna and altair."""

PR_SET_PDEATHSIG = 1
MOST_DESCRIPTORS = 64
OUT_OF_THE_WAY = 512
NAMESPACES = ("uts", "net", "mnt")
"""What tells one host from another where tests make hosts, as the kernel calls them."""


@dataclass(frozen=True)
class Job:
    """What a stub was asked to run.

    Attributes:
        arguments: the path of a program, and what follows it.
        folder: where it runs.
        environment: its variables.
        kept: the descriptors that it has besides the standard streams.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    kept: list[int] = field(default_factory=list)


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        gc.disable()
        for module in [*PRELOADED, *sys.argv[2:]]:
            importlib.import_module(module)
        # Else each process, at its end, goes through all that they have made.
        gc.freeze()
        gc.enable()
        prepare_fork()
        os.write(sys.stdout.fileno(), b"ready\n")
        asked = serve(listener)
    if asked is not None:
        job, kept = asked
        for there, number in zip(kept, job.kept, strict=True):
            os.dup2(there, number)
            os.close(there)
        run(job)


def serve(listener: socket.socket) -> tuple[Job, list[int]] | None:
    """Serve until standard input ends; returns None then.

    In each process that is forked it returns the job, and for now the descriptors to be kept have numbers
    above all that are in use here.
    """
    # By descriptor: the stub, and the process that it waits for.
    stubs = dict[int, tuple[socket.socket, int]]()
    ends = dict[int, tuple[socket.socket, int]]()
    server, poll = os.getpid(), select.poll()
    poll.register(0, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == 0:
                # Their programs are killed when this process ends.
                for stub, _ in stubs.values():
                    _tell(stub, signal.SIGKILL)
                return None
            elif ready == listener.fileno():
                stub, _ = listener.accept()
                try:
                    job, descriptors = _receive(stub)
                except OSError:
                    # The stub was killed before it had asked for anything.
                    stub.close()
                    continue
                process = os.fork()
                if process == 0:
                    _enter_host(_process_of(stub))
                    kept = _become(server, descriptors)
                    for descriptor in [*ends, *stubs, stub.detach()]:
                        os.close(descriptor)
                    for other, _ in ends.values():
                        other.detach()
                    return job, kept
                for descriptor in descriptors:
                    os.close(descriptor)
                _tell(stub, process)
                stubs[stub.fileno()] = ends[os.pidfd_open(process)] = stub, process
                for descriptor in (stub.fileno(), [*ends][-1]):
                    poll.register(descriptor, select.POLLIN)
            elif ready in stubs:
                # The stub is gone: so shall its program be.
                _, process = stubs.pop(ready)
                poll.unregister(ready)
                os.kill(process, signal.SIGKILL)
            elif ready in ends:
                stub, process = ends.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _, status = os.waitpid(process, 0)
                if stubs.pop(stub.fileno(), None):
                    poll.unregister(stub)
                    _tell(stub, status)
                stub.close()


def _receive(stub: socket.socket) -> tuple[Job, list[int]]:
    """The job, and the descriptors of its standard streams, then of those to be kept."""
    length, descriptors, _, _ = socket.recv_fds(stub, 4, MOST_DESCRIPTORS)
    text = stub.recv(int.from_bytes(length), socket.MSG_WAITALL)
    if not length or len(text) < int.from_bytes(length):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionResetError("the stub has not said all")
    return Job(**json.loads(text)), descriptors


def _tell(stub: socket.socket, number: int) -> None:
    """Send a number to a stub, unless that was killed: then the end of its connection is the next event."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stub.sendall(number.to_bytes(4))


def _process_of(stub: socket.socket) -> int:
    """The process at the other end."""
    found = stub.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[0])


def _enter_host(process: int) -> None:
    """Be where a process is, if that is on a host of its own."""
    enter = ctypes.CDLL(None, use_errno=True).setns
    for name in NAMESPACES:
        with open(f"/proc/{process}/ns/{name}") as there:
            same = os.path.samestat(os.fstat(there.fileno()), os.stat(f"/proc/self/ns/{name}"))
            if not same and enter(there.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace of {process}")


def _become(server: int, descriptors: list[int]) -> list[int]:
    """Be a process of its own, with three of these as standard streams, which ends with the server.

    Returns:
        the other descriptors, by numbers of at least `OUT_OF_THE_WAY`.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    for number, stream in enumerate(descriptors[:3]):
        os.dup2(stream, number)
    kept = [fcntl.fcntl(there, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY) for there in descriptors[3:]]
    for descriptor in descriptors:
        os.close(descriptor)
    return kept


def run(job: Job) -> None:
    """Run the program as Python does, in this process."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    sys.argv[:] = job.arguments
    sys.path[:1] = [
        str(Path(job.arguments[0]).parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    runpy.run_path(job.arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
