"""Run under mpirun: the strategies with a centre on servers, on hosts that are letters ("aab").

Usage: python centred.py HOSTS

The last rank is the server. Rank 0 prints a line of JSON: for each strategy, the weights in the end on every
worker, and how many exchanges they had.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

# In place of this folder, which has a page called strategies.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.alone import Setting, train
from tutti.comm.base import keep_servers
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.strategies import EASGD, GEM, Downpour, Lazy, ParamServer

STRATEGIES = {
    "downpour": (Downpour(), 1),
    "downpour, two levels": (Downpour(), 2),
    "easgd": (EASGD(every=2), 1),
    "easgd, two levels": (EASGD(every=2), 2),
    "gem": (GEM(), 1),
    "lazy": (Lazy(slack=1), 1),
    "paramserver": (ParamServer(), 1),
}


def main() -> None:
    from mpi4py import MPI

    hosts = sys.argv[1]
    world = MpiCommunicator.world(hosts[MPI.COMM_WORLD.rank])
    found = {}
    for name, (strategy, levels) in STRATEGIES.items():
        team = keep_servers(world, (world.size - 1,))
        team.servers = replace(team.servers, levels=levels, server_period=3)
        outcome = train(team, Setting(strategy, steps=20, speeds=[0.0] * world.size))
        everyone = world.all_gather_objects(outcome)[:-1]
        found[name] = {
            "finals": [one.final.tolist() for one in everyone],
            "exchanges": [one.traffic.exchanges for one in everyone],
        }
    if world.rank == 0:
        print("RESULT " + json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()
