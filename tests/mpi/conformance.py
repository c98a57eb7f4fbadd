"""Run under mpirun: every strategy learns the digits, on the ranks that it can use.

Usage: python conformance.py HOSTS [NAMES]

HOSTS names the host that each rank counts to, one letter per rank ("aabb"). On several hosts, a strategy with
a parameter centre gets the last rank as its server, and one for a single host trains on each by itself. Rank
0 prints a line of JSON: for each strategy its accuracy, whether its workers ended with the same bits, and
whether others that go on from their state in the middle end with these, if such runs can be equal.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contracts.resuming import Course, begin, checkpoint, go_on
from tests.contracts.strategy import NAMES, REPEATABLE, brisk, learning, on_several_hosts, setting
from tests.contracts.training import needs_centre, train
from tutti.comm.base import Communicator
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.launch.placement import split_off_servers
from tutti.strategies import STRATEGIES

EPOCHS = 4
"""Fewer than elsewhere: ranks of MPI compute while they wait."""


def team(comm: Communicator, name: str) -> Communicator | None:
    """The ranks that train together by this strategy; None for those left over."""
    strategy = brisk(STRATEGIES[name])
    if strategy.most_workers == 1:
        return comm.split(comm.rank)
    if comm.hosts > 1 and not on_several_hosts(strategy):
        return comm.node
    return split_off_servers(comm, 1) if comm.hosts > 1 and needs_centre(strategy) else comm


def learn(comm: Communicator, name: str) -> list[float | bool]:
    """The accuracy, whether all workers agree about it and the weights, and whether others can go on."""
    part = team(comm, name)
    known = replace(setting(STRATEGIES[name]), epochs=EPOCHS)
    outcome = train(part, learning(STRATEGIES[name], known))
    alike = True
    if outcome is not None:
        found = part.all_gather_objects((outcome.accuracy, outcome.weights))
        alike = all(a == found[0][0] and torch.equal(w, found[0][1]) for a, w in found)
    accuracy = 1.0 if outcome is None else outcome.accuracy
    goes_on = name in REPEATABLE and as_if_it_had_never_stopped(part, name)
    accuracies, *facts = zip(*comm.all_gather_objects((accuracy, alike, goes_on)), strict=True)
    return [min(accuracies), *map(all, facts)]


def as_if_it_had_never_stopped(part: Communicator, name: str) -> bool:
    """Whether workers that are made anew end with the same bits."""
    course = Course(brisk(STRATEGIES[name]))
    left = begin(part, course)
    resumed = go_on(part, course, checkpoint(part.all_gather_objects(left)))
    return torch.equal(resumed.final, left.final)


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
    if comm.rank == 0:
        print("RESULT " + json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main()
