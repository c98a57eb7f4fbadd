"""The display of a farm, kept up by its coordinator's own words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from tutti.farm.coordinator import EpochEnded, Happening, JobBegan, JobEnded, JobFound
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.watching.farm import FarmDisplay, FarmProgress


@contextmanager
def farm_shown(
    folder: FarmFolder, epochs: Mapping[str, int | None], stream: IO[str]
) -> Iterator[Callable[[Happening], None]]:
    """Show a farm while it goes on; yield a function that is to hear all that happens.

    Args:
        folder: of the farm.
        epochs: how many each job is to have, by name; None: it has steps.
        stream: where it is shown.
    """
    before = {job: JobState.FINISHED for job in epochs if folder.state(job) is JobState.FINISHED}
    progress = FarmProgress(epochs, dict(before))
    display = FarmDisplay(before, stream)

    def hear(what: Happening) -> None:
        now = time.time()
        if isinstance(what, JobBegan):
            progress.begin(what.job.name, what.block, now)
        elif isinstance(what, EpochEnded):
            progress.epoch(what.block, what.record)
        elif isinstance(what, JobEnded):
            progress.end(what.block, what.outcome.state, what.outcome.seconds)
        elif isinstance(what, JobFound):
            progress.found(what.job.name, what.outcome.state)
        display.show(progress, now)

    try:
        yield hear
    finally:
        display.close()
