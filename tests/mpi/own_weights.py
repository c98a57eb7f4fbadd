"""Run under mpirun: train by every strategy whose workers have weights of their own and no centre.

Usage: python own_weights.py HOSTS

HOSTS names the host that each rank counts to, one letter per rank ("aab"). Rank 0 prints a line of JSON: the
weights that each strategy ends with, whether all ranks have the same, and how far ranks are apart after
training a model that is too large for any buffer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# In place of this folder, whose programs have names that packages of the tests have too.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.processes import STRATEGIES, large, train
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.strategies import ADPSGD, Gossip


def main() -> None:
    from mpi4py import MPI

    comm = MpiCommunicator.world(sys.argv[1][MPI.COMM_WORLD.rank])
    fitting = [name for name, one in STRATEGIES.items() if one.most_hosts is None]
    found = {name: train(comm, STRATEGIES[name]) for name in fitting}
    everyone = comm.all_gather_objects(found)
    apart = [large(comm, strategy) for strategy in (ADPSGD(), Gossip())]
    if comm.rank == 0:
        alike = all(other == found for other in everyone)
        print("RESULT " + json.dumps({"alike": alike, "weights": found, "apart": apart}))
    comm.close()


if __name__ == "__main__":
    main()
