"""A program for `mpirun -n N python followers.py FOLDER`: it notes its processes, and never ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tutti
from tutti.launch.orphans import mpi_segments


def main() -> None:
    folder = Path(sys.argv[1])
    tutti.init().barrier()
    child = subprocess.Popen(["sleep", "600"])
    note = {"processes": [os.getpid(), child.pid], "launcher": os.getppid(), "segments": mpi_segments()}
    path = folder / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}"
    path.with_suffix(".new").write_text(json.dumps(note))
    path.with_suffix(".new").rename(path)
    while True:
        sum(range(1_000_000))


if __name__ == "__main__":
    main()
