"""The making of an ensemble, and its evaluation. Runs on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.data import DataSet, Part
from tutti.errors import BadData
from tutti.exports.sources import read_from
from tutti.records.ensemble import write_ensemble
from tutti.records.predictions import Predictions
from tutti.records.run_folder import WEIGHTS
from tutti.run import summary_lines
from tutti.run.build import class_weights_of, seeded
from tutti.run.config import TrainConfig
from tutti.run.evaluate import open_seen
from tutti.run.jobs import load_job
from tutti.run.predict import write_predictions
from tutti.run.train_job import PARTS
from tutti.run.trained import TrainedModel
from tutti.studies.cross_validation.study import OF_FLAGS_ALONE
from tutti.studies.ensemble.evaluation_job import EnsembleJob, EnsemblePredictJob
from tutti.studies.ensemble.gain import gain_of
from tutti.studies.ensemble.module import Ensemble, load_ensemble
from tutti.training.evaluation import Objective, Tally
from tutti.training.losses import named_loss
from tutti.training.metrics import named_metrics
from tutti.training.precision import Arithmetic
from tutti.training.prediction import predict, predictions_of
from tutti.training.preflight import check_fit
from tutti.training.weights import load_weights, set_weights, weights_to_bytes


def work(comm: Communicator, payload: bytes) -> None:
    """Make an ensemble if it is not there yet, and evaluate it (entry point of the ranks).

    Every rank computes the outputs of all members for its share of the samples.

    Raises:
        UserError: weights cannot be read, or the data do not fit the ensemble.
    """
    job = load_job(payload, EnsembleJob)
    device = job.config.device
    ensemble = Ensemble(job.record, device)
    if job.making is None:
        load_weights(ensemble, Path(job.folder) / WEIGHTS)
    else:
        for member, place in zip(ensemble.members, job.making.places, strict=True):
            _load(member, place)
    with seeded(job.config.seed):
        opened = _opened(job, comm)
        dataset = None if opened is None else opened.with_parts(ensemble.given)
    name = job.part or "test"
    if dataset is not None and job.whole and job.part is None and dataset.test is None:
        name = "train"  # Other data of one part are evaluated whole.
    part = None if dataset is None else getattr(dataset, name)
    if dataset is not None and part is not None:
        arithmetic = Arithmetic(device=device)
        objective = _objective(job, dataset, ensemble, arithmetic)
    if job.making is not None and comm.rank == 0:
        weights = weights_to_bytes(ensemble.state_dict())
        write_ensemble(Path(job.folder), job.record, weights)
        print(f"{job.folder}: {len(job.record.members)} networks", flush=True)
    if dataset is None or part is None:
        if comm.rank == 0:
            print(
                "the data have no test part, so the ensemble is not evaluated; give other --data, or --part"
            )
        return
    found = _predicted(ensemble, part, comm, arithmetic)
    what = f"{name} part of {dataset.name}"
    if found is not None:
        _say(what, found, objective, dataset)
    if job.making is None:
        return
    singles = []
    for single, place in job.making.singles:
        network = TrainedModel(TrainConfig.from_json(single.config), single.data, device)
        _load(network, place)
        singles.append(_predicted(network, network.given(part), comm, arithmetic))
    if found is not None:
        loss = objective.loss
        ours, *theirs = (
            predictions_of(part, torch.from_numpy(one.outputs), loss.ignored)
            for one in (found, *singles)
            if one is not None
        )
        gain = gain_of(ours, theirs, job.making.metric, loss.amounts, loss.name in OF_FLAGS_ALONE)
        print(f"on the {what} {gain.sentence}", flush=True)


def predict_work(comm: Communicator, payload: bytes) -> None:
    """Predict with an ensemble (entry point of the ranks).

    Raises:
        UserError: it cannot be read, or the data do not fit it.
    """
    job = load_job(payload, EnsemblePredictJob)
    write_predictions(job, comm, load_ensemble(job.place, job.trust, job.config.device))


def _load(network: nn.Module, place: str) -> None:
    assert isinstance(network, TrainedModel)
    set_weights(network.model, read_from(Path(place)).weights, Path(place))


def _opened(job: EnsembleJob, comm: Communicator) -> DataSet | None:
    """The data set, with inputs as they are stored; None: it has no test part, and no part was asked for."""
    trained = job.record.members[0].data
    plain = tuple(replace(one, mean=(), std=(), fill=()) for one in trained.inputs)
    data = open_seen(job, comm, replace(trained, mean=(), std=(), fill=(), inputs=plain))
    if getattr(data, job.part or "test") is None:
        if job.part is None:
            return data if job.whole else None
        have = ", ".join(name for name in PARTS if getattr(data, name) is not None)
        raise BadData(f"{data.name} has no {job.part} part; it has: {have}. Choose one with --part")
    return data


def _objective(job: EnsembleJob, data: DataSet, ensemble: Ensemble, arithmetic: Arithmetic) -> Objective:
    config = job.config
    weights = class_weights_of(config, job.record.members[0].data)
    loss = named_loss(config.loss, data, config.loss_options, weights)
    objective = Objective(loss, named_metrics(config.metrics, loss, data), data.classes, arithmetic)
    return check_fit(ensemble, data.train, objective)


def _predicted(
    module: nn.Module, part: Part, comm: Communicator, arithmetic: Arithmetic
) -> Predictions | None:
    outputs = predict(module, part, comm, arithmetic)
    return None if outputs is None else predictions_of(part, outputs)


def _say(what: str, found: Predictions, objective: Objective, data: DataSet) -> None:
    outputs, targets = torch.from_numpy(found.outputs), torch.from_numpy(found.targets)
    tally = Tally(objective)
    value, weight = objective.loss.measure(outputs, targets)
    tally.add(float(value), outputs, targets, weight)
    print(summary_lines.evaluation(what, tally.here(), data.labels), flush=True)
