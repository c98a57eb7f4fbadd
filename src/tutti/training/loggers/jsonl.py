"""`history.jsonl` in the run folder: one `EpochRecord` a line, all of it."""

from __future__ import annotations

from tutti.records.run import EpochRecord
from tutti.training.loggers.base import Logger
from tutti.training.run_folder import RunFolder


class JsonLines(Logger):
    """Appends to the history.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def epoch(self, record: EpochRecord) -> None:
        """Append the record; it is on the disk when this returns."""
        self._folder.append(record)


def open_logger(folder: RunFolder) -> Logger:
    """The logger of a run."""
    return JsonLines(folder)
