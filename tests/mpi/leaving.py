"""Run under mpirun: the last rank ends early, as a program ends; the others wait for it.

Usage: python leaving.py HOSTS OPERATION

HOSTS names the host that each rank counts to, one letter per rank ("ab"). OPERATION is what the others wait
in: barrier, all_reduce, recv, or send.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from mpi4py import MPI

from tutti.comm.base import ANY
from tutti.comm.mpi.communicator import MpiCommunicator

LONG = 1 << 22
"""Bytes of a message that is not sent before somebody receives it."""


def main() -> None:
    hosts, operation = sys.argv[1:]
    MpiCommunicator.world = partial(MpiCommunicator.world, hosts[MPI.COMM_WORLD.rank])  # type: ignore[method-assign]
    import tutti

    comm = tutti.init()
    victim = comm.size - 1
    comm.barrier()
    if comm.rank == victim:
        sys.exit(3)
    if operation == "barrier":
        comm.barrier()
    elif operation == "all_reduce":
        comm.all_reduce(torch.ones(10_000))
    elif operation == "send":
        comm.send(torch.ones(LONG, dtype=torch.uint8), to=victim)
    else:
        comm.recv(torch.ones(1), source=victim if comm.size > 2 else ANY)


if __name__ == "__main__":
    main()
