"""Run under mpirun: the last rank is killed while the others wait for it.

Usage: python lost_rank.py HOSTS

HOSTS names the host that each rank counts to, one letter per rank ("aab").
"""

from __future__ import annotations

import os
import signal
import sys

from tutti.comm.mpi.communicator import MpiCommunicator


def main() -> None:
    from mpi4py import MPI

    comm = MpiCommunicator.world(sys.argv[1][MPI.COMM_WORLD.rank])
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


if __name__ == "__main__":
    main()
