"""Run under mpirun: rank 0 waits in each kind of operation for rank 1, and says what it cost in CPU time.

Usage: python waiting.py HOSTS SECONDS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from tutti.comm.base import Communicator
from tutti.comm.mpi.communicator import MpiCommunicator

OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(1000)),
    "recv": lambda comm: comm.recv(torch.ones(1)) if comm.rank == 0 else comm.send(torch.ones(1), to=0),
}


def main() -> None:
    from mpi4py import MPI

    hosts, seconds = sys.argv[1], float(sys.argv[2])
    comm = MpiCommunicator.world(hosts[MPI.COMM_WORLD.rank])
    shares = {}
    for name, operate in OPERATIONS.items():
        comm.barrier()
        begin, used = time.monotonic(), time.process_time()
        if comm.rank == 1:
            time.sleep(seconds)
        operate(comm)
        shares[name] = (time.process_time() - used) / (time.monotonic() - begin)
    comm.barrier()
    if comm.rank == 0:
        print("RESULT " + json.dumps(shares))


if __name__ == "__main__":
    main()
