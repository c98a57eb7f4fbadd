"""From a choice of candidates to the networks of an ensemble. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadOption
from tutti.records.ensemble import ENSEMBLE, EnsembleRecord, Member, read_ensemble
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run.config import TrainConfig
from tutti.run.trust import check as check_trust
from tutti.studies.cross_validation.study import job_name
from tutti.studies.ensemble.choosing import Choice
from tutti.studies.ensemble.evaluation_job import Making

FOLDER: Final = "ensemble"
"""The folder of an ensemble in that of its farm, unless the user names another."""

HERE: Final[dict[str, Any]] = {
    "split": None,
    "predictions": False,
    "weights": None,
    "strategy": "auto",
    "strategy_options": {},
    "parallel": None,
    "parallel_options": {},
    "workers": "auto",
    "threads": None,
    "hosts": None,
    "servers": 0,
    "levels": 1,
    "server_period": None,
}
"""The fields of a member's configuration that are others where an ensemble is evaluated."""


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


def read_trusted(folder: Path, trust: bool) -> EnsembleRecord:
    """Read the record of an ensemble, unless it names code of others.

    Raises:
        BadRunFolder: there is none, or it is damaged.
        Untrusted: it names code, and no run of this user has written it.
    """
    record = read_ensemble(folder)
    if not trust:
        check_trust(folder / ENSEMBLE, record.configs)
    return record


def _networks(folder: FarmFolder, candidate: str, trust: bool) -> Iterator[tuple[Member, str]]:
    for number in range(folder.plan.question["jobs_each"]):
        path = folder.job(job_name(candidate, number))
        config = TrainConfig.read(path, trust)
        data = RunFolder(path).read(TrainedOn)
        # Without its split, which is a path of this machine.
        yield Member(candidate, replace(config, split=None).as_json(), data), str(path.absolute())
