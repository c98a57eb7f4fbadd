"""A training run, from the configuration to the run folder. Runs on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tutti.bubbles import PipelineRecord
from tutti.comm.base import Communicator
from tutti.data import Batch, DataSet, Part
from tutti.experiments import report
from tutti.experiments.assemble import (
    build_model,
    build_optimizer,
    build_schedule,
    build_strategy,
    named_or_given,
    open_config_data,
    outputs_for,
    part_sizes,
    reseed,
    seeded,
)
from tutti.experiments.config import TrainConfig
from tutti.experiments.job import OBJECT, Job, Outcome, TrainJob, layout_of, load_job
from tutti.experiments.observing import crew_of, observed
from tutti.experiments.pacing import check_pace, deal
from tutti.experiments.recording import Recording
from tutti.experiments.serving import result_for_all, serve, serves, take_sides
from tutti.heartbeats import TESTING
from tutti.launch.sampling import Sampler, sampling
from tutti.parallel.base import Learning, Portion
from tutti.parallel.choice import check_together, portion_of
from tutti.parallel.layout import Layout
from tutti.records import EpochRecord, Evaluation, Summary, World
from tutti.strategies import Clip, Strategy
from tutti.training.arithmetic import Arithmetic
from tutti.training.evaluate import evaluate
from tutti.training.fitting import check_fit
from tutti.training.loggers import logger_names, loggers_of
from tutti.training.loggers.base import Logbook
from tutti.training.loop import Trainer, run_length
from tutti.training.losses import Loss, named_loss
from tutti.training.metrics import Metric, named_metrics
from tutti.training.progress import Several, Silent, progress_on
from tutti.training.run_folder import HISTORY, RunFolder, TrainedOn, check_writable

DEFAULT_EPOCHS = 20
"""Passes over the training samples, when neither epochs nor steps is given."""


@dataclass(frozen=True)
class Task:
    """What is to be learned, by what, and how well it is done: all but the way of training."""

    dataset: DataSet
    module: nn.Module
    loss: Loss
    metrics: tuple[Metric, ...]
    arithmetic: Arithmetic

    def compute_loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss of `module` over a batch, a scalar."""
        inputs, targets = self.arithmetic.inputs(batch.inputs), self.arithmetic.targets(batch.targets)
        return self.loss(self.arithmetic.forward(module, inputs), targets)

    def evaluate(self, part: Part | None, comm: Communicator) -> Evaluation | None:
        """How well the model does on `part` (collective)."""
        if part is None:
            return None
        rest = self.loss, self.metrics, self.dataset.classes
        return evaluate(self.module, part, comm, *rest, arithmetic=self.arithmetic)


def work(comm: Communicator, payload: bytes) -> Outcome:
    """Train, or serve those who train; every rank calls this (entry point of the ranks).

    Args:
        comm: all ranks of the job, servers included.
        payload: a pickled `TrainJob`.

    Raises:
        UserError: the input is wrong.
    """
    job = load_job(payload)
    assert isinstance(job, TrainJob)
    config = job.config
    if job.write and comm.rank == 0:
        check_writable(config.out)
    with seeded(config.seed):
        layout = layout_of(config, comm.size)
        workers = comm.size - config.servers if layout is None else layout.data
        strategy = build_strategy(job, workers, comm.hosts, config.servers)
        check_pace(config, strategy)
        if layout is not None:
            check_together(strategy)
        recording = Recording(comm, job)
        team = take_sides(recording.comm, config)
        outcome = None
        with sampling(crew_of(team), job.write) as sampler:
            task = prepare_task(job, open_config_data(job, comm))
            if serves(team):
                serve(job, team, task.module, strategy)
            else:
                outcome = _train(job, team, task, strategy, layout, sampler, recording)
        said = recording.save(outcome.folder if outcome is not None else None)
        if said and not job.quiet:
            print(*said, sep="\n", flush=True)
        return result_for_all(recording.comm, team, outcome)


def prepare_task(job: Job, dataset: DataSet) -> Task:
    """Build the model, and see that model, data, loss and metrics fit each other.

    Raises:
        UserError: they do not.
    """
    config = job.config
    arithmetic = Arithmetic(config.precision, config.layout, config.device)
    if arithmetic.has_room_for(dataset.nbytes):
        dataset = dataset.on(config.device)
    loss = named_loss(named_or_given(job, "loss"), dataset)
    metrics = named_metrics(named_or_given(job, "metrics"), loss, dataset)
    module = arithmetic.prepare(build_model(job, dataset))
    check_fit(module, dataset.train, loss, metrics, dataset.classes, arithmetic=arithmetic)
    return Task(dataset, module, loss, metrics, arithmetic)


def _train(
    job: TrainJob,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    layout: Layout | None,
    sampler: Sampler | None,
    recording: Recording,
) -> Outcome:
    """Train on all ranks of `comm`, each of which holds the whole model or a portion of it."""
    learning = Learning(task.dataset.train, job.config.batch_size, task.loss, task.arithmetic)
    portion = portion_of(layout, comm, task.module, learning)
    try:
        task = replace(task, module=portion.module)
        trainer, config = prepare_trainer(job, comm, task, strategy, portion)
        recording.attach(trainer)
        return _run(job, comm, task, trainer, config, sampler, portion, recording)
    finally:
        portion.close()


def prepare_trainer(
    job: TrainJob, comm: Communicator, task: Task, strategy: Strategy, portion: Portion
) -> tuple[Trainer, TrainConfig]:
    """Everything that trains, and the configuration with all that was left to us filled in (collective)."""
    config = job.config
    batches, balance = deal(config, strategy, task.dataset.train, portion.peers)
    epochs = config.epochs or (DEFAULT_EPOCHS if config.steps is None else None)
    optimizer = build_optimizer(job, portion.module)
    lr = float(optimizer.param_groups[0]["lr"])
    replica = portion.place(strategy)
    schedule = build_schedule(job, optimizer, run_length(batches, epochs, config.steps))
    clip = Clip(config.clip_norm, config.clip_value)
    worker = portion.worker(strategy, replica, optimizer, clip)
    reseed(config.seed, 1 + portion.peers.rank)
    trainer = Trainer(
        comm=portion.peers,
        replica=replica,
        worker=worker,
        optimizer=optimizer,
        batches=batches,
        loss=task.loss,
        epochs=epochs,
        steps=config.steps,
        metrics=task.metrics,
        validation=task.dataset.validation,
        validate=config.validate,
        classes=task.dataset.classes,
        schedule=schedule,
        balance=balance,
        arithmetic=task.arithmetic,
        compute=portion.compute,
        everyone=comm,
        progress=Silent() if job.quiet else progress_on(sys.stdout, comm.rank),
    )
    found = {
        "strategy": strategy.name,
        "strategy_options": strategy.options(),
        "workers": str(comm.size),
        "threads": torch.get_num_threads(),
        "epochs": epochs,
        "lr": lr,
        "loss": task.loss.name if config.loss == "auto" else config.loss,
        "metrics": _metric_names(config, task.metrics),
        "out": None,
    }
    return trainer, TrainConfig.from_json({**config.as_json(), **found})


def _metric_names(config: TrainConfig, metrics: tuple[Metric, ...]) -> str:
    if config.metrics != "auto":
        return config.metrics
    return ",".join(metric.name for metric in metrics) or "none"


def _run(
    job: TrainJob,
    comm: Communicator,
    task: Task,
    trainer: Trainer,
    config: TrainConfig,
    sampler: Sampler | None,
    portion: Portion,
    recording: Recording,
) -> Outcome:
    """Train, evaluate, write and print."""
    speaks, folder = comm.rank == 0 and not job.quiet, None
    if speaks:
        sizes, shape = part_sizes(task.dataset), task.dataset.shape
        name = config.model.removeprefix(OBJECT)
        print(report.counts(name, portion.parameters, task.dataset.name, sizes, shape), flush=True)
    if job.write and comm.rank == 0:
        folder = RunFolder.create(job.config.out, config.model.removeprefix(OBJECT), task.dataset.name)
        folder.write_config(config.as_json())
        folder.write_data(_trained_on(task.dataset))
    state: dict[str, Any] = {}

    def keep() -> None:
        state.update(portion.state())
        if folder is not None:
            folder.write_weights(state)

    trainer.checkpoint = keep
    # The others wait for rank 0 in `observed`, not in their first step: loggers take seconds to begin.
    observing = observed(comm, folder, sampler, wanted=job.write)
    with _kept(folder, sampler, recording), _logbook(folder, config) as book, observing as heart:
        trainer.progress, trainer.on_epoch = Several(trainer.progress, heart), book.epoch
        history = trainer.fit()
        heart.doing(TESTING)
        test = task.evaluate(task.dataset.test, trainer.comm)
        world = World(comm.size, comm.hosts, torch.get_num_threads())
        summary = Summary.of(history, test, portion.parameters, world)
        pipeline = portion.record()
        if folder is not None:
            if pipeline is not None:
                folder.write_pipeline(pipeline)
            folder.write_summary(summary)
            book.finish(summary)
    if speaks:
        _print_end(summary, task.dataset, folder, history, config.validate, pipeline)
    return Outcome(
        config,
        history,
        summary,
        str(folder.path) if folder else None,
        task.dataset.shape,
        outputs_for(task.dataset),
        _own(state) if job.bring_weights else None,
    )


@contextmanager
def _kept(folder: RunFolder | None, sampler: Sampler | None, recording: Recording) -> Iterator[None]:
    """Keep the folder of a run that fails, unless it does in its first epoch: its name is free again then."""
    try:
        yield
    except Exception:
        if folder is not None and (folder.path / HISTORY).exists():
            recording.rescue(folder.path)
        elif folder is not None:
            if sampler is not None:
                sampler.abandon()
            folder.remove()
        raise


def _logbook(folder: RunFolder | None, config: TrainConfig) -> Logbook:
    """The loggers of the run, on the rank that has its folder."""
    loggers = {} if folder is None else loggers_of(folder, logger_names(config.log))
    return Logbook(loggers, config.as_json())


def _trained_on(dataset: DataSet) -> TrainedOn:
    scale = dataset.train.scale
    return TrainedOn(dataset.name, dataset.classes, dataset.labels, dataset.shape, scale.mean, scale.std)


def _print_end(
    summary: Summary,
    dataset: DataSet,
    folder: RunFolder | None,
    history: list[EpochRecord],
    validate: str,
    pipeline: PipelineRecord | None,
) -> None:
    if summary.test is not None:
        print("\n" + report.evaluation("test", summary.test, dataset.labels) + "\n")
    print(report.speed(summary), *report.exchanges(history), sep="\n")
    if pipeline is not None:
        print(report.bubble(pipeline))
    if validate != "pause" and dataset.validation is not None:
        print(report.validation(validate, history))
    if folder is not None:
        print(f"run folder: {folder.path}")
    sys.stdout.flush()


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """A state in memory of its own: views would be pickled with all that they are views of."""
    return {name: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in state.items()}
