"""A comparison and its folder.

    comparison.json       the combinations, and how often each is repeated: `Comparison`
    solo-1-thread/0/      the run folder of a combination's first repeat
    sync-2-workers/0/
    sync-2-workers/1/     of one that failed: with `error.txt`

Needs neither torch nor MPI.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadOption
from tutti.records.files import refusing
from tutti.records.json_lines import Record, read_record, to_json
from tutti.records.run_folder import RunFolder

FILE: Final = "comparison.json"

CPU: Final = "cpu"
"""The device that others are compared with."""

STRONG: Final = "strong"
WEAK: Final = "weak"
SCALINGS: Final = (STRONG, WEAK)
"""Strong: the same batch behind an update for any number of workers. Weak: the same batch for each worker."""

LAYOUT: Final = "parallel"
"""The part of a run's options that says how ranks hold one model together."""

APART: Final = "apart"
"""The runs were not made as a comparison, but one by one."""


@dataclass(frozen=True)
class Combination(Record):
    """One of the compared ways to train."""

    name: str  # for people, such as "sync, 2 workers"
    folder: str  # of its runs, inside the comparison's
    strategy: str
    workers: int
    threads: int
    scaling: str  # one of `SCALINGS`, or `APART`
    # the fields of the run's configuration in which it differs from the others
    options: dict[str, Any] = field(default_factory=dict)
    # its crossed options: only runs with equal ones are compared
    sweep: dict[str, Any] = field(default_factory=dict)
    device: str = CPU
    # the layout of a model over ranks, such as "data=2,tensor=2"; None: each has a whole model
    parallel: str | None = None

    @property
    def way(self) -> str:
        """The name that it shares with the same way to train on another number of cores."""
        shown = {**self.layout_options, **(self.sweep if self.scaling != APART else {})}
        swept = "".join(f", {key}={value}" for key, value in shown.items())
        layout = ",".join(word.partition("=")[0] for word in (self.parallel or "").split(","))
        return (layout or self.strategy) + swept + ("" if self.device == CPU else f", {self.device}")

    @property
    def layout_options(self) -> dict[str, Any]:
        """Those of its options that say how ranks hold a model together: {"schedule": "gpipe"}."""
        named = {key.partition("."): value for key, value in self.options.items()}
        return {key: value for (part, _, key), value in named.items() if part == LAYOUT}

    @property
    def cores(self) -> int:
        """The number of threads that compute at the same time."""
        return self.workers * self.threads


@dataclass(frozen=True)
class Comparison(Record):
    """A comparison: its task and the compared ways to train."""

    model: str
    data: str
    repeats: int  # the runs of each combination, with seeds that count up
    goal: float | None  # the validation accuracy up to which a run is timed; None: none
    combinations: tuple[Combination, ...]  # in the order of the table
    # the common configuration of all runs, as JSON values
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.goal is not None and not 0 < self.goal <= 1:
            raise BadOption(f"--goal is {self.goal}; give an accuracy above 0 and at most 1, such as 0.9")


@dataclass(frozen=True)
class ComparisonFolder:
    """The folder of a comparison.

    Every method raises `BadRunFolder` for a file that cannot be read or written.
    """

    path: Path

    @property
    def begun(self) -> bool:
        """True if a comparison was written there."""
        return (self.path / FILE).is_file()

    def write(self, comparison: Comparison) -> None:
        """Write the comparison, before its runs."""
        with refusing(self.path / FILE):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / FILE).write_text(to_json(comparison, indent=2) + "\n", encoding="utf-8")

    def read(self) -> Comparison:
        """Read the comparison."""
        return read_record(self.path / FILE, Comparison)

    def run(self, combination: Combination, repeat: int) -> RunFolder:
        """Return the run folder of a repeat."""
        return RunFolder(self.path / combination.folder / str(repeat))

    def clear(self, combination: Combination, repeat: int) -> None:
        """Delete the files of a repeat that did not finish."""
        path = self.run(combination, repeat).path
        with refusing(path), suppress(FileNotFoundError):
            shutil.rmtree(path)
