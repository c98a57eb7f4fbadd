"""Run under mpirun: every strategy learns the digits, on the ranks that it can use.

Usage: python conformance.py HOSTS [NAMES]

HOSTS names the host that each rank counts to, one letter per rank ("aabb"). On several hosts, a strategy with
a parameter centre gets the last rank as its server, and one for a single host trains on each by itself. Rank
0 prints two lines of JSON: for each strategy its accuracy, and whether its workers ended with the same bits;
and what is not as it was where others go on from the state that workers have left in the middle.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contracts.strategy import NAMES, brisk, faults_of_going_on, learning, leave_each, setting, team
from tests.contracts.training import train
from tutti.comm.base import Communicator
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.strategies import STRATEGIES

EPOCHS = 2
"""Fewer than elsewhere: ranks of MPI compute while they wait."""


def learn(comm: Communicator, name: str) -> list[float | bool]:
    """The accuracy, and whether all workers agree about it and the weights."""
    part = team(comm, brisk(STRATEGIES[name]))
    known = replace(setting(STRATEGIES[name]), epochs=EPOCHS)
    outcome = train(part, learning(STRATEGIES[name], known))
    alike = True
    if outcome is not None:
        found = part.all_gather_objects((outcome.accuracy, outcome.weights))
        alike = all(a == found[0][0] and torch.equal(w, found[0][1]) for a, w in found)
    accuracy = 1.0 if outcome is None else outcome.accuracy
    accuracies, facts = zip(*comm.all_gather_objects((accuracy, alike)), strict=True)
    return [min(accuracies), all(facts)]


def main() -> None:
    from mpi4py import MPI

    names = sys.argv[2].split(",") if len(sys.argv) > 2 else NAMES
    comm = MpiCommunicator.world(sys.argv[1][MPI.COMM_WORLD.rank])
    found = {}
    for name in names:
        began = comm.clock()
        found[name] = learn(comm, name)
        if comm.rank == 0:
            print(f"{name}: {found[name]}, {comm.clock() - began:.1f} s", file=sys.stderr, flush=True)
    began = comm.clock()
    left = comm.all_gather_objects(leave_each(comm))
    found_by_ranks = comm.all_gather_objects(faults_of_going_on(comm, left))
    faults = [fault for one in found_by_ranks for fault in one]
    if comm.rank == 0:
        print(f"leaving and going on: {comm.clock() - began:.1f} s", file=sys.stderr, flush=True)
        print("RESULT " + json.dumps(found))
        print("RESULT " + json.dumps(faults))
    comm.close()


if __name__ == "__main__":
    main()
