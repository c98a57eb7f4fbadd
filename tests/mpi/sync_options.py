"""Run under mpirun: train with every setting of `sync` that exchanges gradients in another way.

Usage: python sync_options.py HOSTS

HOSTS names the host that each rank counts to, one letter per rank ("aab"). Rank 0 prints a line of JSON: the
weights that each setting ends with, and whether all ranks have the same bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.sequential import by_strategy
from tests.strategies.test_sync_options import BETWEEN, SETTINGS, SHORT
from tutti.comm.mpi.communicator import MpiCommunicator


def main() -> None:
    from mpi4py import MPI

    comm = MpiCommunicator.world(sys.argv[1][MPI.COMM_WORLD.rank])
    found = {
        name: by_strategy(comm, SHORT, strategy).tolist()
        for name, strategy in {**SETTINGS, **BETWEEN}.items()
    }
    everyone = comm.all_gather_objects(found)
    if comm.rank == 0:
        alike = all(other == found for other in everyone)
        print("RESULT " + json.dumps({"hosts": comm.hosts, "alike": alike, "weights": found}))
    comm.close()


if __name__ == "__main__":
    main()
