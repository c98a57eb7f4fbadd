"""Notes when each rank has finished each step, in a file of its own: see `benchmarks/lost_hosts.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import tutti


class Timed(tutti.Callback):
    """Appends "step seconds" for each step, by the monotonic clock, to a file of each rank and process."""

    def step(self, course: tutti.Course) -> None:
        file = Path(os.environ["TIMED_STEPS"], f"{course.rank}-{os.uname().nodename}-{os.getpid()}")
        with file.open("a") as lines:
            lines.write(f"{course.step} {time.monotonic()}\n")
