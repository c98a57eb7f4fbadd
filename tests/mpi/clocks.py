"""Run under mpirun: compare the clocks of two hosts, which are 7 s apart, and trace a run across them.

Usage: python clocks.py HOSTS

HOSTS names the host of each rank, one letter per rank. Rank 0 prints a line of JSON: for each rank by
how many seconds its clock was found to be ahead, how wrong that may be, and how far it is really; and what a
number of the spans of each name in a trace of the exchanges.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tutti.comm.base import Communicator
from tutti.comm.mpi.communicator import MpiCommunicator
from tutti.comm.traced import TracedCommunicator, compare_clocks
from tutti.records.trace import Lane, Trace, chrome_trace

APART_S = 7.0


def exchanges(comm: Communicator) -> None:
    vector = torch.ones(1000)
    for _ in range(3):
        comm.node.barrier()
        if comm.cross is not None:
            comm.cross.all_reduce(vector)
        comm.exchange(vector, (comm.rank + 1) % comm.size, torch.zeros(1000), (comm.rank - 1) % comm.size)
        with comm.lock():
            pass


def main() -> None:
    from mpi4py import MPI

    hosts = sys.argv[1]
    comm = MpiCommunicator.world(hosts[MPI.COMM_WORLD.rank])
    apart = APART_S if hosts[comm.rank] != hosts[0] else 0.0
    reading = compare_clocks(comm, lambda: comm.clock() + apart)
    assert reading is not None
    trace = Trace()
    exchanges(TracedCommunicator(comm, trace))
    lane = Lane(f"rank {comm.rank}", 0, hosts[comm.rank], trace)
    found: list[Any] = comm.all_gather_objects((reading.ahead_s, reading.residual_s, apart, lane))
    if comm.rank == 0:
        events = chrome_trace([lane for *_, lane in found])["traceEvents"]
        spans = Counter(event["name"] for event in events if event["ph"] == "X")
        print("RESULT " + json.dumps({"clocks": [one[:3] for one in found], "spans": spans}))
    comm.close()


if __name__ == "__main__":
    main()
