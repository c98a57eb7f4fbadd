"""Run under mpirun: every check of the communicator contract, in one world.

Usage: python contract.py [HOSTS]

HOSTS names the host that each rank counts to, one letter per rank ("aab"); without it, hosts are what they
are. Rank 0 prints a line of JSON: the number of hosts, and for the check that failed its tracebacks by rank.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contracts.communicator import CHECKS
from tutti.comm.mpi.communicator import MpiCommunicator


def main() -> None:
    from mpi4py import MPI

    hosts = sys.argv[1] if len(sys.argv) > 1 else None
    world = MpiCommunicator.world(hosts[MPI.COMM_WORLD.rank] if hosts else None)
    failures: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(world)
            failed = None
        except Exception:
            failed = traceback.format_exc()
        # A rank that failed is out of step with the others: end here, by name.
        everyone = MPI.COMM_WORLD.gather(failed)
        broken = [f"rank {rank}:\n{text}" for rank, text in enumerate(everyone or []) if text]
        if MPI.COMM_WORLD.bcast(broken):
            failures[check.__name__] = "\n".join(broken)
            break
    if world.rank == 0:
        print("RESULT " + json.dumps({"hosts": world.hosts, "size": world.size, "failures": failures}))
    world.close()


if __name__ == "__main__":
    main()
