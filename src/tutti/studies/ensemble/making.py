"""The networks of an ensemble, from the runs of a farm or the checkpoints of a run, saved together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.errors import BadOption
from tutti.exports.sources import read_from
from tutti.records import checkpoints
from tutti.records.ensemble import EnsembleMember, EnsembleRecord, write_ensemble
from tutti.records.farm_folder import FarmFolder
from tutti.records.output_kinds import kind_of
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run.config import OBJECT, TrainConfig
from tutti.run.trained import TrainedModel
from tutti.studies.cross_validation.result import job_name
from tutti.studies.ensemble.choosing import Selection
from tutti.studies.ensemble.module import Ensemble
from tutti.training.weights import set_weights, weights_to_bytes


def ensemble_of(
    folder: FarmFolder, chosen: Selection, method: str, trust: bool
) -> tuple[EnsembleRecord, list[Path]]:
    """Return an ensemble of the networks of all folds of each candidate, and where their weights are.

    Raises:
        UserError: a run of the farm cannot be read, or names code, and `trust` is False.
    """
    members, places = list[EnsembleMember](), list[Path]()
    for name in chosen.weights:
        for number in range(len(folder.plan.question["ratios"])):
            place = folder.job(job_name(name, number))
            config = _kept(TrainConfig.read(place, trust), name)
            members.append(EnsembleMember(name, config, RunFolder(place).read(TrainedOn)))
            places.append(place)
    return EnsembleRecord(chosen.kind.value, method, chosen.weights, tuple(members)), places


def snapshots_of(folder: RunFolder, top: int | None, trust: bool) -> tuple[EnsembleRecord, list[Path]]:
    """Return the ensemble of a run's checkpoints, which have the same weight, and where their weights are.

    Huang, Li, Pleiss, Liu, Hopcroft and Weinberger, Snapshot ensembles: train 1, get M for free, ICLR 2017:
    the learning rate falls to 0 and is set up again, several times, and the weights at the end of each cycle
    are a network.

    Args:
        folder: of the run.
        top: take this many of the newest; None: all.
        trust: whether the run's configuration may name code.

    Raises:
        BadOption: there are not as many.
        UserError: the run cannot be read, or names code, and `trust` is False.
    """
    config = TrainConfig.read(folder.path, trust)
    places = checkpoints.present(folder.path / checkpoints.FOLDER)
    if not 1 <= (2 if top is None else top) <= len(places):
        raise BadOption(
            f"{folder.path} has {len(places)} checkpoints, for an ensemble of {top or 'at least 2'}; train "
            "with --schedule warm, and with --checkpoint and --keep such that the weights at the end of each "
            "cycle stay"
        )
    chosen, data = places[-(top or len(places)) :], folder.read(TrainedOn)
    values, kind = _kept(config, str(folder.path)), kind_of(config.loss, data.classes)
    weights = {place.name: 1 / len(chosen) for place in chosen}
    members = tuple(EnsembleMember(name, values, data) for name in weights)
    return EnsembleRecord(kind.value, "mean", weights, members), chosen


def save_ensemble(out: Path, record: EnsembleRecord, places: Sequence[Path]) -> None:
    """Write an ensemble, with the weights of its members from their places."""
    ensemble = Ensemble(record)
    for member, place in zip(ensemble.members, places, strict=True):
        assert isinstance(member, TrainedModel)
        set_weights(member.model, read_from(place).weights, place)
    write_ensemble(out, record, weights_to_bytes(ensemble.state_dict()))


def _kept(config: TrainConfig, name: str) -> dict[str, Any]:
    """Return what an ensemble keeps of a configuration: no split, which is a path, and no Python objects."""
    if config.model.startswith(OBJECT):
        raise BadOption(
            f"the model of {name} was a Python object ('{config.model.removeprefix(OBJECT)}'), by which a "
            "saved ensemble cannot be built; train 'file.py:name' or a class of a module instead"
        )
    loss, metrics = ("auto" if value.startswith(OBJECT) else value for value in (config.loss, config.metrics))
    options = {} if config.loss.startswith(OBJECT) else config.loss_options
    return replace(config, split=None, loss=loss, loss_options=options, metrics=metrics).as_json()
