"""The evaluation of an ensemble, and its predictions. Runs on every rank."""

from __future__ import annotations

from tutti.comm.base import Communicator
from tutti.run import summary_lines
from tutti.run.build import class_weights_of, seeded
from tutti.run.evaluate import open_seen, part_named
from tutti.run.jobs import load_job
from tutti.run.predict import write_predictions
from tutti.studies.ensemble.evaluation_job import EnsembleJob, EnsemblePredictJob
from tutti.studies.ensemble.module import load_ensemble
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import named_loss
from tutti.training.metrics import named_metrics
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit


def work(comm: Communicator, payload: bytes) -> None:
    """Evaluate an ensemble (entry point); each rank computes the outputs of all members."""
    job = load_job(payload, EnsembleJob)
    config = job.config
    ensemble = load_ensemble(job.folder, job.trust, config.device)
    trained = ensemble.data
    with seeded(config.seed):
        target = ensemble.record.members[0].config["data_options"].get("target")
        found = open_seen(job, comm, trained, table=ensemble.table, target=target)
    # Each member scales its own inputs and outputs.
    dataset = found.with_parts(lambda part: ensemble.seen(found.name, part, (), found.table))
    name = "train" if job.part is None and job.other_data and dataset.test is None else job.part or "test"
    part = part_named(dataset, name)
    loss = named_loss(config.loss, dataset, config.loss_options, class_weights_of(config, trained))
    metrics = named_metrics(config.metrics, loss, dataset)
    arithmetic = Arithmetic(device=config.device)
    objective = Objective(loss, metrics, dataset.classes, arithmetic, dataset.weighted)
    result = evaluate(ensemble, part, comm, check_fit(ensemble, dataset.train, objective)).total(comm)
    if comm.rank == 0:
        print(summary_lines.evaluation(f"{name} part of {dataset.name}", result, dataset.labels), flush=True)


def predict_work(comm: Communicator, payload: bytes) -> None:
    """Predict with an ensemble (entry point)."""
    job = load_job(payload, EnsemblePredictJob)
    write_predictions(job, comm, load_ensemble(job.place, job.trust, job.config.device))
