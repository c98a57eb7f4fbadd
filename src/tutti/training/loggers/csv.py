"""`history.csv` in the run folder: one epoch a line, its figures in columns, for spreadsheets and pandas."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from tutti.records.run import EpochRecord
from tutti.records.run_folder import CSV
from tutti.registry import part
from tutti.training.loggers.base import Logger, figures_of


@part("csv")
class Csv(Logger):
    """A file of comma-separated values, to which lines are appended; the first one has the columns' names."""

    always = True

    _columns: Sequence[str] = ()

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Append the figures of earlier epochs."""
        self._append(records)

    def epoch(self, record: EpochRecord) -> None:
        """Append the epoch's figures."""
        self._append([record])

    def _append(self, records: Sequence[EpochRecord]) -> None:
        self._folder.refuse_lost()
        with open(self._folder.path / CSV, "a", encoding="utf-8", newline="") as file:
            for row in map(_row, records):
                if not self._columns:
                    self._columns = list(row)
                    csv.writer(file, lineterminator="\n").writerow(self._columns)
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)


def _row(record: EpochRecord) -> dict[str, object]:
    figures = {name: value for name, value in figures_of(record).items() if name != "epoch"}
    return {
        "time": record.time,
        "epoch": record.epoch,
        "step": record.step,
        "complete": record.complete,
        **figures,
    }
