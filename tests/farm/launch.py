"""One of several launches on a farm: python launch.py FOLDER [waits].

It prints each job that it begins, goes on when it is given a line after the first, and prints at the end what
it knows of all. One that waits does so after the second epoch of its first job, whose rank waits, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

from tests.farm.job_list import JobList
from tutti.farm.coordinator import Happening, JobBegan
from tutti.farm.jobs import FarmJob
from tutti.farm.work import work_on
from tutti.records.farm_folder import FarmFolder
from tutti.records.run import EpochRecord
from tutti.run.config import TrainConfig

LONG = "long"
TINY = TrainConfig(model="mlp", model_options={"hidden": [4]}, data="digits", epochs=1, batch_size=256)
JOBS = [
    FarmJob(LONG, TINY.changed({"epochs": 6, "checkpoint": "1 epoch"}), prunable=True),
    *(FarmJob(f"short/{seed}", TINY.changed({"seed": seed})) for seed in range(11)),
]


class Waiting(JobList):
    """Jobs that never go on after two epochs."""

    def epoch(self, job: FarmJob, record: EpochRecord) -> bool:
        """Let it go on, or wait for the end of all days."""
        if record.epoch == 2:
            print("waits", flush=True)
            Event().wait()
        return False


def known(jobs: JobList) -> dict[str, float]:
    """Return the final loss of each job that has finished, by name."""
    summaries = {name: one.summary for name, one in jobs.outcomes.items()}
    return {name: one.test.loss for name, one in sorted(summaries.items()) if one is not None and one.test}


def work(path: Path, jobs: JobList, begun: Callable[[str], object]) -> dict[str, float]:
    """Work on the farm beside others, tell which jobs begin, and return what is known at the end."""

    def say(what: Happening) -> None:
        if isinstance(what, JobBegan):
            begun(what.job.name)

    folder = FarmFolder.begin(path, "test", {}, resume=True)
    work_on(folder, jobs, blocks=1, threads=1, listener=say)
    return known(jobs)


if __name__ == "__main__":
    told = list[str]()

    def tell(job: str) -> None:
        print(job, flush=True)
        told.append(job)
        if len(told) == 1:
            sys.stdin.readline()

    kind = Waiting if sys.argv[2:] else JobList
    print(json.dumps(work(Path(sys.argv[1]), kind(JOBS), tell)))
