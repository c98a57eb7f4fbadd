"""Run under mpirun: the last rank dies in the middle of an operation; the others say whom they lost.

Usage: python lost_rank.py HOSTS OPERATION WAY FOLDER

HOSTS names the host that each rank counts to, one letter per rank ("aab"), or is "-": hosts are what they
are. OPERATION is barrier, all_reduce, recv, or server: the last rank keeps a centre, rank 0 waits for it, and
the others for rank 0. WAY is kill (SIGKILL) or exit (the process ends without a word
to MPI). Each survivor prints the ranks that it lost. FOLDER is empty.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from tutti.comm.base import Communicator, keep_servers
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.errors import PeerLost


def operate(comm: Communicator, operation: str) -> None:
    victim = comm.size - 1
    if operation == "barrier":
        comm.barrier()
    elif operation == "all_reduce":
        comm.all_reduce(torch.ones(10_000))
    elif operation == "server":
        if comm.servers is not None and comm.rank == 0:
            comm.servers.comm.recv(torch.ones(1), source=comm.servers.ranks[0])
        comm.barrier()
    elif comm.rank == victim:
        comm.send(torch.ones(1), to=(comm.rank + 1) % comm.size)
    else:
        comm.recv(torch.ones(1), source=victim)


def leave_together(comm: Communicator, folder: Path) -> None:
    """End, when all survivors have reported: whoever ended earlier would be lost too."""
    (folder / str(comm.rank)).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < comm.size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    # MPI cannot be finalised without the lost rank, and only a killed rank is missed by mpirun.
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    from mpi4py import MPI

    hosts, operation, way, folder = sys.argv[1:]
    comm = MpiCommunicator.world(None if hosts == "-" else hosts[MPI.COMM_WORLD.rank])
    team = keep_servers(comm, [comm.size - 1]) if operation == "server" else comm
    comm.barrier()
    if comm.rank == comm.size - 1:
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    begin = time.monotonic()
    try:
        while True:
            operate(team, operation)
    except PeerLost as error:
        seconds = time.monotonic() - begin
        print(
            "RESULT " + json.dumps({"rank": comm.rank, "lost": error.ranks, "seconds": seconds}), flush=True
        )
        leave_together(comm, Path(folder))


if __name__ == "__main__":
    main()
