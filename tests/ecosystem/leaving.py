"""DDP programs of which a rank leaves in the middle, in several ways: leaving.py FILE BACKEND.

Ranks are forked, as importing torch takes longer than all else here. FILE gets, as JSON and by way of
leaving, what the other rank caught, after how many seconds, and how the processes ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti  # noqa: F401
from tests.ecosystem.jobs import meeting_point
from tests.ecosystem.outcomes import PATIENCE, RANKS

STEPS = 1000
LAST_STEP = 3


@dataclass(frozen=True)
class Way:
    """How rank `leaver` leaves."""

    how: str
    leaver: int


WAYS = {
    "raises": Way("raise", 1),
    "raises in a hook": Way("hook", 1),
    "exits": Way("exit", 1),
    "returns": Way("return", 1),
    "is killed": Way("kill", 1),
    "keeps the store and exits": Way("exit", 0),
}


def main() -> None:
    found = {}
    for name, way in WAYS.items():
        with meeting_point() as variables:
            os.environ |= variables
            found[name] = run(way, sys.argv[2])
    Path(sys.argv[1]).write_text(json.dumps(found))


def run(way: Way, backend: str) -> dict[str, object]:
    """What becomes of the ranks when one leaves in this way."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=work, args=(rank, way, backend, theirs)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    theirs.close()
    for rank in ranks:
        rank.join(PATIENCE.total_seconds())
    hang = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
        rank.join()
    said = [ours.recv() for _ in range(2) if ours.poll()]
    return {
        "hang": hang,
        "codes": [rank.exitcode for rank in ranks],
        "leaver": way.leaver,
        "caught": next((text for _, text in said if text), None),
        "seconds": said[-1][0] - said[0][0] if len(said) == 2 else None,
    }


def work(rank: int, way: Way, backend: str, report: Connection) -> None:
    """A rank of a DDP program."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group(backend, timeout=PATIENCE)
    model = DistributedDataParallel(nn.Linear(50, 50))
    try:
        for step in range(STEPS):
            if step == LAST_STEP and rank == way.leaver:
                report.send((time.time(), ""))
                if leave(way.how):
                    return
            if step == LAST_STEP and way.how == "hook":
                model = DistributedDataParallel(model.module)
                model.register_comm_hook(rank == way.leaver, all_reduce_or_raise)
            model(torch.randn(4, 50)).sum().backward()
    except Exception as error:
        if rank != way.leaver:
            report.send((time.time(), f"{type(error).__name__}: {error}"))
        raise


def leave(how: str) -> bool:
    """Leave in this way; returns whether the function of the rank shall return."""
    if how == "raise":
        raise RuntimeError("this rank has had enough")
    if how == "exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return how == "return"


def all_reduce_or_raise(refuse, bucket):
    if refuse:
        raise RuntimeError("this rank has had enough")
    total = dist.all_reduce(bucket.buffer(), async_op=True)
    return total.get_future().then(lambda future: future.value()[0])


if __name__ == "__main__":
    main()
