"""A program with a farm of two blocks that never ends: python endless.py FOLDER.

It prints its process, and the job of each epoch that ends.
"""

from __future__ import annotations

import os
import sys

from tests.farm.job_list import JobList
from tutti.farm.coordinator import EpochEnded, Happening
from tutti.farm.jobs import FarmJob
from tutti.farm.work import work_on
from tutti.records.farm_folder import FarmFolder
from tutti.run.config import TrainConfig

CONFIG = TrainConfig(model="mlp", data="digits", steps=10_000_000, batch_size=512)


def _say(what: Happening) -> None:
    if isinstance(what, EpochEnded):
        print(what.job.name, flush=True)


if __name__ == "__main__":
    print(os.getpid(), flush=True)
    folder = FarmFolder.begin(sys.argv[1], "test", {})
    jobs = JobList([FarmJob(f"endless-{number}", CONFIG) for number in range(2)])
    work_on(folder, jobs, blocks=2, listener=_say)
