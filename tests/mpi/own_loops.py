"""Run under mpirun: loops of the user's own, each compared with plain torch.

Usage: python own_loops.py HOSTS NAME...

HOSTS names the host that each rank counts to, one letter per rank ("ab"); the NAMEs are of loops of
`tests.own_loop.loops`. Each rank prints a line of JSON: what hosts there are, and for each loop how this rank
ended otherwise than plain torch.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

# In place of this folder, whose programs have names that packages of the tests have too.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.own_loop.jobs import Refused, differences, run_plain, run_rank
from tests.own_loop.loops import LOOPS
from tutti.comm.base import Communicator
from tutti.comm.mpi.communicator import MpiCommunicator


def compare(comm: Communicator, name: str) -> list[str]:
    """Compare a loop's end with that in plain torch, which has moved the weights."""
    wanted, found = run_plain(LOOPS[name]), run_rank(comm, LOOPS[name])
    return [found.sentence] if isinstance(found, Refused) else differences(found, wanted)


def main() -> None:
    from mpi4py import MPI

    hosts, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    comm = MpiCommunicator.world(hosts[MPI.COMM_WORLD.rank])
    found = {name: compare(comm, name) for name in names}
    print("RESULT " + json.dumps({"hosts": comm.hosts, "loops": found}), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
