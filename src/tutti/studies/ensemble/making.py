"""Saving the networks of an ensemble from the runs of a farm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.errors import BadOption
from tutti.exports.sources import read_from
from tutti.records.ensemble import EnsembleMember, EnsembleRecord, write_ensemble
from tutti.records.farm_folder import FarmFolder
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
    """Return an ensemble of the networks of all folds, and the places of their weights."""
    members, places = list[EnsembleMember](), list[Path]()
    for name in chosen.weights:
        for number in range(len(folder.plan.question["ratios"])):
            place = folder.job(job_name(name, number))
            config = _kept(TrainConfig.read(place, trust), name)
            members.append(EnsembleMember(name, config, RunFolder(place).read(TrainedOn)))
            places.append(place)
    return EnsembleRecord(chosen.kind.value, method, chosen.weights, tuple(members)), places


def save_ensemble(out: Path, record: EnsembleRecord, places: Sequence[Path]) -> None:
    """Write an ensemble, with the weights of its members from their places."""
    ensemble = Ensemble(record)
    for member, place in zip(ensemble.members, places, strict=True):
        assert isinstance(member, TrainedModel)
        set_weights(member.model, read_from(place).weights, place)
    write_ensemble(out, record, weights_to_bytes(ensemble.state_dict()))


def _kept(config: TrainConfig, name: str) -> dict[str, Any]:
    """Return the configuration to keep in an ensemble, without the path of its split and Python objects."""
    if config.model.startswith(OBJECT):
        raise BadOption(
            f"the model of {name} was a Python object ('{config.model.removeprefix(OBJECT)}'), which a saved "
            "ensemble cannot build; train 'file.py:name' or a class of a module instead"
        )
    loss, metrics = ("auto" if value.startswith(OBJECT) else value for value in (config.loss, config.metrics))
    options = {} if config.loss.startswith(OBJECT) else config.loss_options
    return replace(config, split=None, loss=loss, loss_options=options, metrics=metrics).as_json()
