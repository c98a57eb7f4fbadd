"""Run under mpirun: the last rank leaves while the others wait for it; these say whom they lost, and when.

Usage: python leaving.py HOSTS HOW WAITS

HOSTS names the host that each rank counts to, one letter per rank. The last rank "destroys" its group,
"ends", "is killed", "is late", or "is late for one" (the first gives up, and leaves, before the others do);
the others wait in WAITS: "all_reduce", "recv" or "new_group".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed

import tutti  # noqa: F401
from tutti.errors import PeerLost
from tutti.torch_backend import group as tutti_group
from tutti.torch_backend.errors import Absent


def leave(how: str, rank: int) -> None:
    if how.startswith("is late"):
        store = distributed.distributed_c10d._get_default_store()
        store.wait([f"told {other}" for other in range(rank)])
    elif how == "destroys":
        distributed.destroy_process_group()
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def wait(where: str, last: int) -> None:
    if where == "recv":
        distributed.recv(torch.ones(4), last)
    elif where == "new_group":
        distributed.new_group(list(range(last + 1)))
    else:
        distributed.all_reduce(torch.ones(4))


def main() -> None:
    hosts, how, where = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    tutti_group.host_key = lambda: hosts[rank]
    distributed.init_process_group("tutti")
    distributed.all_reduce(torch.ones(4))
    if rank == len(hosts) - 1:
        leave(how, rank)
        return
    began = time.monotonic()
    if how.startswith("is late"):
        limit = timedelta(seconds=1 + rank if how == "is late for one" else 1)
        distributed.distributed_c10d._get_default_group().set_timeout(limit)
    try:
        wait(where, len(hosts) - 1)
    except (PeerLost, Absent) as error:
        found = {"rank": rank, "lost": list(error.ranks), "after_s": time.monotonic() - began}
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    if how.startswith("is late"):
        distributed.distributed_c10d._get_default_store().set(f"told {rank}", "")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
