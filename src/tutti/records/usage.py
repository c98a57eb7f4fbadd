"""Samples of the cores and memory that a run uses on its hosts. Needs neither torch nor MPI."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tutti.records.json_lines import Record

GONE: Final = "gone"
"""The state of a process that has ended."""

STOPPED: Final = ("stopped", "tracing-stop")
"""The states of a process that was stopped, such as by SIGSTOP or by a debugger."""


@dataclass(frozen=True)
class RankUsage:
    """One rank's use of its host."""

    rank: int  # its number among the workers; those of servers come after the workers'
    # its proportional set size in bytes: memory that several processes share counts in equal parts. None if
    # the kernel does not report it, or the rank was about to end when it was looked at first
    pss: int | None
    cpu: float  # CPU time since the sample before, in percent of one core; above 100 with several threads
    state: str  # of its process, as psutil calls it ("running", "sleeping", "stopped", ...), or "gone"


@dataclass(frozen=True)
class UsageRecord(Record):
    """A sample of one host."""

    time: float  # seconds since 1970 (UTC)
    host: str  # its name
    # the load of each core since the sample before, in percent, other programs' included: each logical CPU
    # that the job may use, in the order of their numbers
    cores: list[float]
    ranks: list[RankUsage] = field(default_factory=list)  # the ranks on this host
