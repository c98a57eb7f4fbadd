"""What the ranks of the launch tests run: functions of (comm, payload)."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from tutti.comm.base import Communicator, keep_servers
from tutti.errors import BadData
from tutti.launch.launcher import started_by
from tutti.launch.placement import Placement
from tutti.launch.start import start
from tutti.launch.world import join


def describe(comm: Communicator, payload: bytes) -> object:
    """What each rank is like."""
    nested = start("tests.launch.entries:world_size", b"", Placement(comm.size, 1))
    return comm.all_gather_objects(
        {
            "rank": comm.rank,
            "size": comm.size,
            "payload": payload,
            "threads": torch.get_num_threads(),
            "cores": sorted(os.sched_getaffinity(0)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
            "pid": os.getpid(),
            "launcher": started_by().launcher.name,
            "joined": join() is comm,
            "nested": nested,
        }
    )


def world_size(comm: Communicator, payload: bytes) -> object:
    return comm.size


def leave_files_open(comm: Communicator, payload: bytes) -> object:
    """One that a module refers to, one in a circle, and one that is written when that circle is freed."""

    class Circle:
        def __init__(self, name: str) -> None:
            self.path, self.own = Path(payload.decode(), f"{name}-{comm.rank}"), self
            self.file = self.path.open("wb")
            self.file.write(b"something")

        def __del__(self) -> None:
            self.path.with_name(f"freed-{comm.rank}").write_text("now")

    gc.disable()  # Freed before the end, the parts of the file would be closed in any order, as Python does.
    Circle("bytes")
    text = Path(payload.decode(), f"text-{comm.rank}").open("w")  # noqa: SIM115  It is left open.
    text.write("a text")
    sys.left_open = text  # type: ignore[attr-defined]
    atexit.register(Path(payload.decode(), f"atexit-{comm.rank}").write_text, "called")
    return None


def fail_at_the_end(comm: Communicator, payload: bytes) -> object:
    """Rank 1 ends with another exit code, or leaves a file open for which there is no room."""
    if comm.rank == 1 and payload:
        sys.left_open = Path(payload.decode()).open("w")  # type: ignore[attr-defined]  # noqa: SIM115
        sys.left_open.write("a text")  # type: ignore[attr-defined]
    elif comm.rank == 1:
        atexit.register(os._exit, 5)
    return None


def sum_of_ranks(comm: Communicator, payload: bytes) -> object:
    vector = torch.tensor([float(comm.rank)])
    comm.all_reduce(vector)
    return vector.item()


def fail(comm: Communicator, payload: bytes) -> object:
    """Rank 1 fails, and writes down when; rank 2 looks at nobody and rank 0 waits for the others."""
    when = Path(payload.decode(), "when")
    Path(payload.decode(), f"pid-{comm.rank}").write_text(str(os.getpid()))
    comm.barrier()
    if comm.rank == 1:
        when.write_text(str(time.monotonic()))
        raise ValueError("seven is not a colour")
    if comm.rank == 2:
        while True:
            signal.pause()
    comm.barrier()
    return None


def bad_data(comm: Communicator, payload: bytes) -> object:
    raise BadData("the labels are 12, expected 0 to 9; check the file")


def die(comm: Communicator, payload: bytes) -> object:
    """Rank 1 is gone as the payload says; the others wait for it."""
    if comm.rank == 1:
        if payload == b"exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return None


def fork_here(comm: Communicator, payload: bytes) -> object:
    """Rank 1 forks a process that ends like a program of its own, before the rank itself does."""
    if comm.rank == 1:
        child = os.fork()
        if child == 0 and payload == b"raise":
            raise SystemExit(3)
        if child == 0:
            return None
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != (3 if payload == b"raise" else 0):
            raise ValueError(f"the process ended with {status}")
    comm.barrier()
    return comm.rank


def wait_for_ever(comm: Communicator, payload: bytes) -> object:
    """Write down this rank's processes and MPI's files; rank 0 does not listen to SIGTERM."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    path = Path(payload.decode(), f"rank-{comm.rank}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    note = {
        "rank": os.getpid(),
        "child": child.pid,
        "launcher": _launcher(),
        "segments": sorted({line.split()[-1] for line in maps if "/dev/shm/" in line}),
    }
    path.with_suffix(".new").write_text(json.dumps(note))
    path.with_suffix(".new").rename(path)
    if comm.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    comm.barrier()
    return None


def _launcher() -> int:
    """The process that has started this rank; mpirun is named by its namespace, "prterun-HOST-PROCESS@1"."""
    namespace = os.environ.get("PMIX_NAMESPACE", "")
    return int(namespace.rpartition("-")[2].partition("@")[0]) if namespace else os.getppid()


def kill_server(comm: Communicator, payload: bytes) -> object:
    """Start a process that starts another one, and kill the server that has forked the ranks."""
    program = "import os, signal; child = os.fork(); child and print(child, flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    found = int(child.stdout.readline()), child.pid
    Path(payload.decode(), f"rank-{comm.rank}").write_text(json.dumps(found))
    comm.barrier()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    return None


def leave_a_daemon(comm: Communicator, payload: bytes) -> object:
    """A process of a session of its own, that is nobody's child and carries no mark."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.close(writing)
    os.wait()
    # Whoever execs has closed its end of the pipe, and is nobody's child by then.
    os.read(reading, 1)
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _is_child(path)]


def _is_child(stat: Path) -> bool:
    try:
        name, _, rest = stat.read_text().rpartition(")")
    except OSError:
        return False
    return name.endswith("(sleep") and int(rest.split()[1]) == os.getppid()


remembered: list[int] = []


def circumstances(comm: Communicator, payload: bytes) -> object:
    """What differs between the processes of one job and the next."""
    import numpy as np

    remembered.append(comm.rank)
    return comm.all_gather_objects(
        {
            "bound": os.environ.get("OMP_PROC_BIND"),
            "of a farm": "tutti.farm.coordinator" in sys.modules,
            "server": os.getppid(),
            "folder": os.getcwd(),
            "path": list(sys.path),
            "arguments": list(sys.argv),
            "variable": os.environ.get("A_VARIABLE"),
            "remembered": list(remembered),
            "random": np.random.random(),
        }
    )


def interrupt(comm: Communicator, payload: bytes) -> object:
    """Rank 0 sends a signal to the process that the payload names; nobody ever ends."""
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(payload), signal.SIGINT)
    while True:
        time.sleep(1)


def describe_alone(comm: Communicator, payload: bytes) -> object:
    return os.getpid(), torch.get_num_threads(), comm.size


def places(comm: Communicator, payload: bytes) -> object:
    """Where the ranks are, and what they were handed."""
    return comm.hosts, comm.all_gather_objects((socket.gethostname(), payload.decode()))


def take_sides(comm: Communicator, payload: bytes) -> object:
    """Workers have the sum of their ranks from the first server; all tell what they are."""
    team = keep_servers(comm, int(payload))
    servers = team.servers
    assert servers is not None
    total = torch.zeros(1)
    if servers.serving:
        for _ in range(comm.size - len(servers.ranks)):
            message = torch.zeros(1)
            if servers.comm.rank == servers.ranks[0]:
                servers.comm.recv(message, tag=1)
            total += message
        for worker in range(comm.size - len(servers.ranks)):
            if servers.comm.rank == servers.ranks[0]:
                servers.comm.send(total, to=worker, tag=2)
    else:
        servers.comm.send(torch.tensor([float(team.rank)]), to=servers.ranks[0], tag=1)
        servers.comm.recv(total, source=servers.ranks[0], tag=2)
    return comm.all_gather_objects(
        {
            "host": socket.gethostname(),
            "serving": servers.serving,
            "team": (team.rank, team.size),
            "answer": total.item(),
            "threads": torch.get_num_threads(),
            "cores": sorted(os.sched_getaffinity(0)),
            "pid": os.getpid(),
        }
    )
