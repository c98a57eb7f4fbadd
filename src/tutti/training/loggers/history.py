"""The history of a run in its folder: `history.jsonl` and `history.csv`."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from tutti.records.run import EpochRecord
from tutti.records.run_folder import CSV
from tutti.registry import part
from tutti.training.loggers import Logger, figures_of


@part("csv")
class CsvLogger(Logger):
    """One epoch a line, its figures in columns, for spreadsheets and pandas."""

    always = True

    _columns: Sequence[str] = ()

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Append the figures of earlier epochs."""
        with open(self._folder.path / CSV, "a", encoding="utf-8", newline="") as file:
            for record in records:
                place = {"time": record.time, "epoch": record.epoch, "step": record.step}
                row = {**place, "complete": record.complete, **figures_of(record), "epoch": record.epoch}
                if not self._columns:
                    self._columns = list(row)
                    csv.writer(file, lineterminator="\n").writerow(self._columns)
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def epoch(self, record: EpochRecord) -> None:
        """Append the epoch's figures."""
        self.go_on([record])


@part("jsonl")
class JsonLinesLogger(Logger):
    """One whole `EpochRecord` a line; each epoch is appended."""

    always = True

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """Keep only these epochs."""
        self._folder.keep(EpochRecord, records)

    def epoch(self, record: EpochRecord) -> None:
        """Append the record; it is on the disk when this returns."""
        self._folder.append(record)
