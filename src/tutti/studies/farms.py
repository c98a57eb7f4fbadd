"""The farm of a study: its blocks, its files, its display. Needs no torch."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from tutti.farm.block_placement import place_blocks
from tutti.farm.blocks import ENTRY
from tutti.farm.coordinator import EpochEnded, FarmOutcome, Happening, JobBegan, JobEnded, JobFound
from tutti.launch.fork_server_client import prepare_ranks
from tutti.records.farm_folder import DATA, FarmFolder, JobState
from tutti.records.files import make_file, refusing, replace_file
from tutti.records.npz import npz_bytes
from tutti.records.texts import duration
from tutti.training.intervals import seconds_of
from tutti.watching.farm import FarmDisplay, FarmProgress

FOLDER: Final = Path("farms")
"""The parent of farms for which no folder is given."""


@dataclass(frozen=True)
class Blocks:
    """The ranks of a farm, and their time limits, as for `tutti.farm.work.work_on`."""

    block: int = 1
    blocks: int | None = None
    threads: int | None = None
    job_timeout_s: float | None = None
    time_limit_s: float | None = None

    @classmethod
    def of(
        cls,
        block: int,
        blocks: int | None,
        threads: int | None,
        job_timeout: str | None,
        time_limit: str | None,
    ) -> Blocks:
        """Check the options of blocks; durations are texts such as "10m"."""
        place_blocks(block, blocks, threads, None)
        limits = {"--job-timeout": job_timeout, "--time-limit": time_limit}
        seconds = (None if text is None else seconds_of(text, name) for name, text in limits.items())
        return cls(block, blocks, threads, *seconds)

    def prepare(self) -> None:
        """Start the fork server of the ranks, which imports torch in the meantime."""
        prepare_ranks(ENTRY)


@contextmanager
def farm_shown(
    folder: FarmFolder, epochs: Mapping[str, int | None], stream: IO[str]
) -> Iterator[Callable[[Happening], None]]:
    """Show the progress of a farm; yield its listener."""
    before = {job: JobState.FINISHED for job in epochs if folder.state(job) is JobState.FINISHED}
    progress = FarmProgress(epochs, dict(before))
    display = FarmDisplay(before, stream)
    display.show(progress, time.time())

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


def print_times(outcome: FarmOutcome | None, stream: IO[str]) -> None:
    """Print how long the jobs of a farm took."""
    if outcome is not None and outcome.seconds > 0 and outcome.busy_s > 0:
        blocks = f"{outcome.blocks} block{'' if outcome.blocks == 1 else 's'}"
        took = f"{duration(outcome.busy_s)} in total, {duration(outcome.seconds)} elapsed"
        times = f"{outcome.busy_s / outcome.seconds:.2f} at a time"
        print(f"jobs: {took} on {blocks}, {times}", file=stream)


def keep_data(folder: FarmFolder, arrays: Mapping[str, Any] | None) -> None:
    """Write arrays given in Python into the folder of a farm, unless they are there already."""
    if arrays is not None and not (folder.path / DATA).is_file():
        with refusing(folder.path):
            make_file(folder.path / DATA, npz_bytes(arrays))


def write_table(path: Path, lines: Sequence[Sequence[object]]) -> None:
    """Write a CSV file, whole or not at all."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    with refusing(path):
        replace_file(path, text.getvalue().encode())
