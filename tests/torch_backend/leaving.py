"""Run under mpirun: the last rank leaves while the others wait for it; these say whom they lost, and when.

Usage: python leaving.py HOSTS HOW WAITS

HOSTS names the host that each rank counts to, one letter per rank. The last rank "destroys" its group, or
"ends"; the others wait in WAITS: "all_reduce" or "recv".
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import distributed

import tutti  # noqa: F401
from tutti.errors import PeerLost
from tutti.torch_backend import group as tutti_group


def leave(how: str) -> None:
    if how == "destroys":
        distributed.destroy_process_group()


def wait(where: str, last: int) -> None:
    if where == "recv":
        distributed.recv(torch.ones(4), last)
    else:
        distributed.all_reduce(torch.ones(4))


def main() -> None:
    hosts, how, where = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    tutti_group.host_key = lambda: hosts[rank]
    distributed.init_process_group("tutti")
    distributed.all_reduce(torch.ones(4))
    if rank == len(hosts) - 1:
        leave(how)
        return
    began = time.monotonic()
    try:
        wait(where, len(hosts) - 1)
    except PeerLost as error:
        found = {"rank": rank, "lost": list(error.ranks), "after_s": time.monotonic() - began}
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
