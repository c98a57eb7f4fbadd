"""From a choice of candidates to the networks of an ensemble. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadOption
from tutti.records import checkpoints
from tutti.records.ensemble import Combination, EnsembleRecord, Member
from tutti.records.farm_folder import FarmFolder
from tutti.records.output_kinds import Kind, kind_of
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run.config import OBJECT, TrainConfig
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
        trust: whether configurations may name code, which runs then.

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


def snapshots_of(folder: RunFolder, top: int | None, trust: bool) -> tuple[EnsembleRecord, Making]:
    """Return the ensemble of a run's checkpoints, which have the same weight.

    Huang, Li, Pleiss, Liu, Hopcroft and Weinberger, Snapshot ensembles: train 1, get M for free, ICLR 2017:
    the learning rate falls to 0 and is set up again, several times, and the weights at the end of each cycle
    are a network. It is compared with the one that the run has ended with.

    Args:
        folder: of the run.
        top: take so many of the newest; None: all that there are.
        trust: as for `ensemble_of`.

    Raises:
        BadOption: there are not so many.
        UserError: the run cannot be read, or names code, and no run of this user has written it.
    """
    config = TrainConfig.read(folder.path, trust)
    places = checkpoints.present(folder.path / checkpoints.FOLDER)
    wanted = 2 if top is None else top
    if not 1 <= wanted <= len(places):
        asked = "an ensemble needs 2 at least" if top is None else f"--top is {top}"
        raise BadOption(
            f"{folder.path} has {len(places)} checkpoint{'' if len(places) == 1 else 's'}, and {asked}; "
            "train with --schedule warm, and with --checkpoint and --keep such that the weights at the end "
            "of each cycle stay"
        )
    data = folder.read(TrainedOn)
    kind = kind_of(config.loss, data.classes)
    chosen = places[-(top or len(places)) :]
    names = tuple(place.name for place in chosen)
    values = _kept(config, str(folder.path))
    members = tuple(Member(name, values, data) for name in names)
    combination = Combination("mean", names, (1 / len(names),) * len(names))
    single = Member(folder.path.name, values, data), str(folder.path.absolute())
    making = Making(
        tuple(str(place.absolute()) for place in chosen),
        (single,),
        "accuracy" if kind is Kind.FLAGS else "auto",
    )
    return EnsembleRecord(kind.value, combination, members), making


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
        yield Member(candidate, _kept(config, candidate), data), str(path.absolute())


def _kept(config: TrainConfig, name: str) -> dict[str, Any]:
    """Return what an ensemble keeps of a configuration: no split, which is a path, and no Python objects.

    Raises:
        BadOption: the model was a Python object.
    """
    if config.model.startswith(OBJECT):
        raise BadOption(
            f"the model of {name} was a Python object ('{config.model.removeprefix(OBJECT)}'), by which a "
            "saved ensemble cannot be built; train 'file.py:name' or a class of a module instead"
        )
    loss, metrics = ("auto" if value.startswith(OBJECT) else value for value in (config.loss, config.metrics))
    options = {} if config.loss.startswith(OBJECT) else config.loss_options
    return replace(config, split=None, loss=loss, loss_options=options, metrics=metrics).as_json()
