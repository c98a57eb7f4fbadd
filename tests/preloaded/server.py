"""Forks a process for each stub that asks: python -m tests.preloaded.server SOCKET

It says "ready" when it listens, and ends, with all programs, when its standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from dataclasses import dataclass
from pathlib import Path

PRELOADED = (
    # torch imports its compiler when the first optimizer is made, which takes seconds in every process.
    "torch._dynamo",
    "tutti.torch_backend.group",
    "tutti.comm.shm.communicator",
    "tutti.run.train",
)
PR_SET_PDEATHSIG = 1
NAMESPACES = ("uts", "net", "mnt")
"""What tells one host from another where tests make hosts, as the kernel calls them."""


@dataclass(frozen=True)
class Job:
    """What a stub was asked to run.

    Attributes:
        arguments: the path of a program, and what follows it.
        folder: where it runs.
        environment: its variables.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        gc.disable()
        for module in PRELOADED:
            importlib.import_module(module)
        # Else each process, at its end, goes through all that they have made.
        gc.freeze()
        gc.enable()
        os.write(sys.stdout.fileno(), b"ready\n")
        job = serve(listener)
    if job is not None:
        run(job)


def serve(listener: socket.socket) -> Job | None:
    """Serve until standard input ends; returns the job in each process that is forked, None in the server."""
    # By descriptor: the stub, and the process that it waits for.
    stubs = dict[int, tuple[socket.socket, int]]()
    ends = dict[int, tuple[socket.socket, int]]()
    server, poll = os.getpid(), select.poll()
    poll.register(0, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == 0:
                return None
            elif ready == listener.fileno():
                stub, _ = listener.accept()
                try:
                    job, streams = _receive(stub)
                except OSError:
                    # The stub was killed before it had asked for anything.
                    stub.close()
                    continue
                process = os.fork()
                if process == 0:
                    _enter_host(_process_of(stub))
                    _become(server, streams)
                    for descriptor in [*ends, *stubs, stub.detach()]:
                        os.close(descriptor)
                    for other, _ in ends.values():
                        other.detach()
                    return job
                for stream in streams:
                    os.close(stream)
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
    """The job, and the descriptors of its standard streams."""
    length, streams, _, _ = socket.recv_fds(stub, 4, 3)
    text = stub.recv(int.from_bytes(length), socket.MSG_WAITALL)
    if not length or len(text) < int.from_bytes(length):
        for stream in streams:
            os.close(stream)
        raise ConnectionResetError("the stub has not said all")
    return Job(**json.loads(text)), streams


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


def _become(server: int, streams: list[int]) -> None:
    """Be a process of its own, with these standard streams, which ends with the server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


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
