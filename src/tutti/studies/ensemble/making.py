"""From a choice of candidates to the networks of an ensemble. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from tutti.errors import BadOption
from tutti.records.ensemble import EnsembleRecord, Member
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.study import job_name
from tutti.studies.ensemble.choosing import Choice
from tutti.studies.ensemble.evaluation_job import Making

FOLDER: Final = "ensemble"
"""The folder of an ensemble in that of its farm, unless the user names another."""


def ensemble_of(
    folder: FarmFolder, choice: Choice, metric: str, trust: bool
) -> tuple[EnsembleRecord, Making]:
    """Return the ensemble of a choice: of each candidate the networks of all folds.

    Args:
        folder: of the farm.
        choice: the candidates.
        metric: by which the ensemble is compared with the networks of the best single candidate.
        trust: whether configurations may name code of others, which runs then.

    Raises:
        UserError: a run of the farm cannot be read, or names code, and no run of this user has written it.
    """
    found = [pair for name in choice.combination.candidates for pair in _networks(folder, name, trust)]
    members, places = zip(*found, strict=True)
    singles = tuple(_networks(folder, choice.best, trust))
    return (
        EnsembleRecord(choice.kind.value, choice.combination, members),
        Making(places, singles, metric),
    )


def refuse_there(out: Path) -> None:
    """Refuse a place that is taken.

    Raises:
        BadOption: something is there.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadOption(f"{out} is there already; name another folder with --out, or delete it")


def _networks(folder: FarmFolder, candidate: str, trust: bool) -> Iterator[tuple[Member, str]]:
    for number in range(folder.plan.question["jobs_each"]):
        path = folder.job(job_name(candidate, number))
        config = TrainConfig.read(path, trust)
        data = RunFolder(path).read(TrainedOn)
        # Without its split, which is a path of this machine.
        yield Member(candidate, replace(config, split=None).as_json(), data), str(path.absolute())
