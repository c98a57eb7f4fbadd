"""A program that makes steps until it is asked to stop: python stopping.py FOLDER WHERE [HOSTS | -n N].

Its ranks wait where they are told to (loading, training), and leave a file when they are there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from tutti.errors import EXIT_INTERRUPTED
from tutti.launch.launcher import started_by
from tutti.launch.placement import place_ranks
from tutti.launch.start import start
from tutti.launch.stop_request import stop_requested, stoppable

if TYPE_CHECKING:
    # It imports torch, which takes seconds: the supervisor does without.
    from tutti.comm.base import Communicator


def work(comm: Communicator, payload: bytes) -> object:
    """Make steps until any rank is asked to stop; returns whether that was so."""
    folder, where = json.loads(payload)
    here = Path(folder)

    def be_at(moment: str) -> None:
        note = here / f"{moment}-{comm.rank}"
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
        while where == moment != "training":
            time.sleep(0.05)

    be_at("loading")
    stopped, steps = False, 0
    with stoppable():
        comm.barrier()
        be_at("training")
        while not stopped and steps != (3 if where == "ending" else -1):
            time.sleep(0.01)
            stopped = any(comm.all_gather_objects(stop_requested()))
            steps += 1
        if stopped:
            be_at("saving")
            time.sleep(0.3)
            (here / f"saved-{comm.rank}").write_text(str(steps))
        comm.barrier()
    comm.barrier()
    return stopped


def main() -> int:
    folder, where, *more = sys.argv[1:]
    hosts = more[0] if more and more[0] != "-n" else None
    workers = int(more[1]) if more and hosts is None else "auto" if hosts or started_by().mpi else 2
    Path(folder, "program").write_text(str(os.getpid()))
    payload = json.dumps([folder, where]).encode()
    stopped = start("tests.launch.stopping:work", payload, place_ranks(workers, hosts=hosts))
    print("stopped" if stopped else "done", flush=True)
    return EXIT_INTERRUPTED if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
