"""The results of a comparison, or of separate runs, read from their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.comparison import APART, Combination, Comparison, ComparisonFolder
from tutti.records.run_folder import CONFIG, RunFolder
from tutti.records.texts import printable
from tutti.reports.runs import Run
from tutti.reports.scaling import Row, rows

SAME: Final = ("model", "model_options", "data", "data_options")
"""The fields of a configuration that define the task: compared runs should have equal ones."""


@dataclass(frozen=True)
class Results:
    """The runs of a comparison, with their errors."""

    comparison: Comparison
    runs: Mapping[str, Sequence[Run]]  # by the folder of the combination
    errors: Mapping[str, str] = field(default_factory=dict)  # by the folder of the combination
    notes: Sequence[str] = ()

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The rows of the table, one for each combination."""
        return rows(self.comparison, self.runs, self.errors, self.part)

    @cached_property
    def part(self) -> str:
        """The part of the data for metrics: "test" if all runs have one, else "validation"."""
        summaries = [run.summary for found in self.runs.values() for run in found]
        tested = all(one is not None and one.test is not None for one in summaries)
        return "test" if tested else "validation"

    def each(self) -> Iterator[tuple[Row, int, Run]]:
        """Yield every run with its row and its repeat, from 0."""
        for row in self.rows:
            for repeat, run in enumerate(self.runs[row.combination.folder]):
                yield row, repeat, run

    @property
    def courses(self) -> list[str]:
        """Sentences about the runs: where they were resumed, and how they ended."""
        found: list[str] = []
        for row, _, run in self.each():
            best = [] if row.combination.scaling != APART or run.best is None else [run.best]
            found += (f"{row.combination.name}: {sentence}" for sentence in [*run.course, *best])
        return [printable(sentence) for sentence in found]

    def pair(self, better: Callable[[Row], float | None]) -> list[Row]:
        """Return the best row with one worker, and the best row with several, if there are any."""
        known = [row for row in self.rows if self.runs[row.combination.folder] and better(row) is not None]
        alone = [row for row in known if row.combination.workers == 1]
        several = [row for row in known if row.combination.workers > 1]
        order = [(row.combination.strategy == "solo", better(row) or 0.0, row) for row in alone]
        best_alone = [max(order, key=lambda one: one[:2])[2]] if order else []
        return best_alone + ([max(several, key=lambda row: better(row) or 0.0)] if several else [])


def read_results(paths: Sequence[Path]) -> Results:
    """Read the results in the folder of a comparison, or in run folders."""
    compared = [path for path in paths if ComparisonFolder(path).begun]
    if not compared:
        return read_runs(paths)
    if len(paths) > 1:
        raise BadRunFolder(f"{compared[0]} is a comparison; give it alone, or give run folders")
    return read_comparison(compared[0])


def read_comparison(folder: Path) -> Results:
    """Read the finished runs of a comparison."""
    compared = ComparisonFolder(folder)
    comparison = compared.read()
    runs: dict[str, list[Run]] = {}
    errors: dict[str, str] = {}
    notes: list[str] = []
    for one in comparison.combinations:
        runs[one.folder] = []
        for repeat in range(comparison.repeats):
            run = compared.run(one, repeat)
            if (error := run.error()) is not None:
                errors.setdefault(one.folder, error.strip())
            if run.finished:
                try:
                    runs[one.folder].append(Run.read(run.path))
                except BadRunFolder as damage:
                    notes.append(f"{damage}; it is left out")
    notes += [note for found in runs.values() for run in found for note in run.damage]
    return Results(comparison, runs, errors, [printable(note) for note in notes])


def read_runs(paths: Sequence[Path]) -> Results:
    """Read separate runs, finished or not, as a comparison of one run each."""
    paths = [*dict.fromkeys(paths)]
    found = [Run.read(path) for path in paths]
    for run in found:
        if not run.config:
            raise BadRunFolder(f"{run.path} has no {CONFIG}; give the folder that 'tutti train' wrote")
    names = [printable(path.resolve().name) for path in paths]
    if len(set(names)) < len(names):
        names = [printable(str(path)) for path in paths]
    ways = tuple(_combination(name, run) for name, run in zip(names, found, strict=True))
    model, data = (
        ", ".join(dict.fromkeys(str(run.config.get(key)) for run in found)) for key in ("model", "data")
    )
    notes = [note for run in found for note in run.damage]
    differ = [key for key in SAME if any(run.config.get(key) != found[0].config.get(key) for run in found)]
    notes += [f"the runs differ in {key}: their tasks are not the same" for key in differ]
    notes += [
        f"{run.path} is unfinished and shown up to epoch {run.history[-1].epoch}; "
        f"{RunFolder(run.path).next_step}"
        for run in found
        if not run.finished
    ]
    runs = {one.folder: [run] for one, run in zip(ways, found, strict=True)}
    return Results(Comparison(model, data, 1, None, ways), runs, {}, [printable(note) for note in notes])


def _combination(name: str, run: Run) -> Combination:
    """Return a run as a combination, whose baselines have the same number of samples and batch size."""
    config, last = run.config, run.history[-1]
    try:
        return Combination(
            name=name,
            folder=str(run.path),
            strategy=str(config["strategy"]),
            workers=int(config["workers"]),
            threads=int(config["threads"]),
            scaling=APART,
            sweep={"samples": run.samples, "samples in a round": round(run.samples / last.step)},
            device=str(config["device"]),
            parallel=None if config.get("parallel") is None else str(config["parallel"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadRunFolder(
            f"{run.path / CONFIG} is not what 'tutti train' wrote ({type(error).__name__}: {error}); "
            "train again"
        ) from error
