"""Samples of the cores and memory that a run uses on its hosts. Needs neither torch nor MPI.

usage.jsonl           one `UsageRecord` a line, of the host of rank 0
usage-HOST.jsonl      likewise, of another host that sees the run folder
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tutti.records.json_lines import JsonLinesFile, Record, read_lines

GONE: Final = "gone"
"""The state of a process that has ended."""

STOPPED: Final = ("stopped", "tracing-stop")
"""The states of a process that was stopped, such as by SIGSTOP or by a debugger."""


@dataclass(frozen=True)
class RankUsage:
    """One rank's use of its host.

    Attributes:
        rank: its number among the workers; those of servers come after the workers'.
        pss: its proportional set size in bytes: memory that several processes share counts in equal parts.
            None if the kernel does not report it.
        cpu: CPU time since the sample before, in percent of one core; above 100 with several threads.
        state: of its process, as psutil calls it ("running", "sleeping", "stopped", ...), or "gone".
    """

    rank: int
    pss: int | None
    cpu: float
    state: str


@dataclass(frozen=True)
class UsageRecord(Record):
    """A sample of one host.

    Attributes:
        time: seconds since 1970 (UTC).
        host: its name.
        cores: the load of each core since the sample before, in percent, other programs' included: each
            logical CPU that the job may use, in the order of their numbers.
        ranks: the ranks on this host.
    """

    time: float
    host: str
    cores: list[float]
    ranks: list[RankUsage] = field(default_factory=list)

    def check(self) -> None:
        """Raise ValueError if its time or a load is not finite."""
        if not all(map(math.isfinite, (self.time, *self.cores))):
            raise ValueError("a time or a share of a core is not finite")


def usage_file(folder: Path, host: str | None = None) -> Path:
    """Return the file with the samples of a host.

    Args:
        folder: the run's.
        host: its name; None: the host of rank 0.
    """
    return folder / ("usage.jsonl" if host is None else f"usage-{host}.jsonl")


def usage_files(folder: Path) -> list[Path]:
    """Return the files of samples in a run folder, that of rank 0's host first."""
    others = sorted(folder.glob("usage-*.jsonl"))
    return [path for path in (usage_file(folder), *others) if path.is_file()]


def read_usage(folder: Path) -> JsonLinesFile[UsageRecord]:
    """Read the samples of all hosts, in the order of time; none if a run has left none.

    Args:
        folder: the run's.

    Raises:
        BadRunFolder: a file cannot be opened.
    """
    found = [read_lines(path, UsageRecord.from_json) for path in usage_files(folder)]
    records = sorted((record for lines in found for record in lines.records), key=lambda record: record.time)
    return JsonLinesFile(records, [sentence for lines in found for sentence in lines.damage])
