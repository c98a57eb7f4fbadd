"""The assembly of a training run's parts, for every command that trains. Runs on every rank.

configuration ▸ resolved ─┬▸ batches ─────────────────────────┐
portion ▸ optimizer ──────┴▸ replica ▸ schedule ▸ worker ▸ Assembly
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.load_object import names_object
from tutti.model_parallel.base import Portion
from tutti.run.build import build_optimizer, build_schedule, deal
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.task import Task
from tutti.strategies import Clip, Strategy
from tutti.training.trainer import Hooks, Schedule, Trainer, Workers
from tutti.training.validation import ValidationPlan

DEFAULT_EPOCHS: Final = 20
"""Passes over the training samples, when neither epochs nor steps is given."""


@dataclass(frozen=True)
class Assembly:
    """The parts of a training run on one rank.

    Attributes:
        config: the configuration, with all that was left open filled in.
        task: what is learned, by this rank's portion of the model.
        portion: of the model.
        workers: the ranks, and how this one steps.
        schedule: the batches, and how many updates are made with them.
    """

    config: TrainConfig
    task: Task
    portion: Portion
    workers: Workers
    schedule: Schedule

    def trainer(self, hooks: Hooks | None = None) -> Trainer:
        """The trainer of the whole run."""
        part = self.task.dataset.validation
        validation = None if part is None else ValidationPlan(part, self.config.validate)
        return Trainer(self.workers, self.task.objective, self.schedule, validation, hooks)


def assemble(job: Job, comm: Communicator, task: Task, strategy: Strategy, portion: Portion) -> Assembly:
    """Lay a rank's portion of the model out for training (collective).

    Args:
        job: what is to be done.
        comm: all ranks that train.
        task: what is learned.
        strategy: fits the ranks.
        portion: of the task's model.

    Raises:
        UserError: the optimizer, its schedule or the batches cannot be made as the configuration says.
    """
    task = replace(task, module=portion.module)
    optimizer = build_optimizer(job, portion.module)
    config = resolved(job.config, comm, task, strategy, optimizer)
    batches, balance = deal(config, strategy, task.dataset.train, portion.peers)
    updates = Schedule(batches, config.epochs, config.steps, balance=balance)
    replica = portion.place(strategy)
    updates = replace(updates, lr=build_schedule(job, optimizer, updates.updates))
    worker = portion.worker(strategy, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    compute = portion.compute
    workers = Workers(portion.peers, replica, worker, optimizer, compute, compute is not None, comm)
    return Assembly(config, task, portion, workers, updates)


def resolved(
    config: TrainConfig, comm: Communicator, task: Task, strategy: Strategy, optimizer: Optimizer
) -> TrainConfig:
    """The configuration with all that was left to us filled in."""
    names = ",".join(metric.name for metric in task.objective.metrics) or "none"
    return replace(
        config,
        # A class of the user's is found again by its file or package, not by its name.
        strategy=config.strategy if names_object(config.strategy) else strategy.name,
        strategy_options=strategy.options(),
        workers=str(comm.size),
        threads=torch.get_num_threads(),
        epochs=config.epochs or (DEFAULT_EPOCHS if config.steps is None else None),
        lr=float(optimizer.param_groups[0]["lr"]),
        loss=task.objective.loss.name if config.loss == "auto" else config.loss,
        metrics=names if config.metrics == "auto" else config.metrics,
    )
