"""A program for `mpirun -n N python in_mpi.py start ENTRY PAYLOAD` or `... join HOW`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tutti.launch.placement import place_ranks
from tutti.launch.start import start
from tutti.launch.world import join


def main() -> None:
    if sys.argv[1] == "start":
        result = start(
            f"tests.launch.entries:{sys.argv[2]}", sys.argv[3].encode(), place_ranks(), announce=print
        )
        print(f"result {result}")
        return
    comm = join()
    assert join() is comm
    if comm.rank == 1 and sys.argv[2] == "exit":
        sys.exit(3)
    if comm.rank == 1:
        raise ValueError("seven is not a colour")
    comm.barrier()


if __name__ == "__main__":
    main()
