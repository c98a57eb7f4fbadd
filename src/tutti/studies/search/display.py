"""The words of a search: how it goes on, what is best, and what has mattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Final

import optuna

from tutti.records.farm_folder import FarmFolder
from tutti.records.texts import duration, metric_text
from tutti.records.untrusted import printable
from tutti.run.config import TrainConfig
from tutti.studies.blocks import Blocks
from tutti.studies.search.study import Search, Tuned, tune
from tutti.studies.search.trials import JOURNAL
from tutti.studies.showing import farm_shown
from tutti.tables import TextTable
from tutti.terminal import console_on

SHOWN: Final = 5
"""Limit on the equally good trials that are shown, and on the failures."""

_SAID: Final = {"fail": "failed"}
"""The states of trials whose words are others than Optuna's."""


def print_question(search: Search, trials: int, stream: IO[str]) -> None:
    """Print what is searched, and by what."""
    count = search.count(trials)
    folds = f" x {search.folds} folds" if search.folds > 1 else ""
    aims = " and ".join(f"{aim.better} {aim.name}" for aim in search.aims)
    print(
        f"search: {count} trials{folds} for {aims}; sampler {search.sampler}, pruner {search.pruner}",
        file=stream,
    )
    for name, dimension in search.space.dimensions.items():
        print(f"  {printable(name)}: {printable(str(dimension.as_json()))}", file=stream)


def tune_shown(search: Search, folder: FarmFolder, trials: int, blocks: Blocks, stream: IO[str]) -> Tuned:
    """Search, and show how that goes."""
    jobs = [job for number in range(search.count(trials)) for job in search.job_names(number)]
    with farm_shown(folder, dict.fromkeys(jobs, search.span), stream) as hear:
        return tune(search, folder, trials, blocks, hear)


def print_findings(
    found: Tuned, stream: IO[str], command: Callable[[TrainConfig], str] | None = None
) -> None:
    """Print the best trials, how to train the best one alone, what has mattered, and what was saved.

    Args:
        found: the search.
        stream: where to.
        command: spells the command that trains a configuration; None: there is none to be shown.
    """
    best, states = found.best, found.states()
    counted = ", ".join(f"{count} {_SAID.get(state, state)}" for state, count in sorted(states.items()))
    print(f"trials: {counted}", file=stream)
    for number, why in [*found.failed().items()][:SHOWN]:
        print(f"trial {number} failed: {printable(why)}", file=stream)
    if len(best) > 1:
        console_on(stream).print(_front(found, best))
    if best:
        print(f"best: trial {best[0].number}, {_values(found, best[0])}", file=stream)
        for name, value in found.options(best[0]).items():
            print(f"  {printable(name)}: {printable(str(value))}", file=stream)
    if best and command is not None:
        print(f"to train it alone: {printable(command(found.config(best[0])))}", file=stream)
    shares = found.importance()
    if shares:
        said = ", ".join(f"{printable(name)} {share:.0%}" for name, share in shares.items())
        print(f"importance: {said}", file=stream)
    trained, whole = found.epochs()
    if found.search.pruner != "none" and whole:
        print(f"epochs: {trained:.0f} of {whole} trained, {1 - trained / whole:.0%} saved", file=stream)
    outcome = found.outcome
    if outcome is not None and outcome.seconds > 0 and outcome.busy_s > 0:
        blocks = f"{outcome.blocks} block{'' if outcome.blocks == 1 else 's'}"
        took = f"{duration(outcome.busy_s)} added up, {duration(outcome.seconds)} by the clock"
        print(f"the jobs took {took} on {blocks}", file=stream)
    print(f"study: {printable(str(found.folder.path / JOURNAL))}, trials: {found.write_table()}", file=stream)


def _values(found: Tuned, trial: optuna.trial.FrozenTrial) -> str:
    pairs = zip(found.search.aims, trial.values or [], strict=True)
    return ", ".join(f"{printable(aim.name)} {metric_text(aim.name, value)}" for aim, value in pairs)


def _front(found: Tuned, best: list[optuna.trial.FrozenTrial]) -> TextTable:
    """Return the table of the trials that no other one is better than in all objectives."""
    names = list(found.search.space.dimensions)
    heads = ("trial", *(aim.name for aim in found.search.aims), *names)
    table = TextTable(heads, drop=names[::-1], title="best trials")
    for trial in best:
        figures = [
            metric_text(aim.name, value) for aim, value in zip(found.search.aims, trial.values, strict=True)
        ]
        options = found.options(trial)
        table.add_row(str(trial.number), *figures, *(str(options[name]) for name in names))
    return table
