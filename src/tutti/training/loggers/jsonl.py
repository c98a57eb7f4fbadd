"""`history.jsonl` in the run folder: one `EpochRecord` a line, all of it."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.records.run import EpochRecord
from tutti.registry import part
from tutti.training.loggers.base import Logger


@part("jsonl")
class JsonLinesLogger(Logger):
    """The history of the run folder, to which each epoch is appended."""

    always = True

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Keep what the file has of them, and nothing else."""
        self._folder.keep_epochs(records)

    def epoch(self, record: EpochRecord) -> None:
        """Append the record; it is on the disk when this returns."""
        self._folder.append(record)
