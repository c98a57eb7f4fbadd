"""The task of a run: its data, model, loss and metrics. Runs on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.data import Batch, DataSet, Part
from tutti.model_parallel.base import Workload, count_of
from tutti.records.run import Evaluation
from tutti.run import summary_lines
from tutti.run.build import build_model, outputs_for
from tutti.run.jobs import Job
from tutti.run.pickled_arguments import OBJECT, named_or_given
from tutti.run.train_job import PARTS
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES, named_loss
from tutti.training.metrics import named_metrics
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit
from tutti.training.target_kinds import are_flags

FEW: Final = 5
"""Up to so many classes are told by their names."""


@dataclass(frozen=True)
class Task:
    """Data, model, loss and metrics: all of a run but the way of training.

    Attributes:
        dataset: what is to be learned.
        name: of the model.
        module: the model.
        parameters: how many trainable numbers it has.
        objective: loss and metrics of the run, and how the model computes.
    """

    dataset: DataSet
    name: str
    module: nn.Module
    parameters: int
    objective: Objective

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes, of the whole model where this rank holds a portion of it."""
        own = sum(one.numel() * one.itemsize for one in [*self.module.parameters(), *self.module.buffers()])
        return max(own, self.parameters * torch.float32.itemsize)

    def described(self) -> str:
        """Model, data and what is to be learned, in a line each."""
        data, of = self.dataset, self.objective
        parts = {name: len(part) for name in PARTS if (part := getattr(data, name)) is not None}
        sizes = summary_lines.counts(self.name, self.parameters, data.name, parts, data.shape)
        return f"{sizes}\n{summary_lines.task(self.kind, of.loss.name, [one.name for one in of.metrics])}"

    @property
    def kind(self) -> str:
        """The kind of targets, in words."""
        targets, data, loss = self.dataset.train.targets, self.dataset, self.objective.loss
        if data.classes is not None:
            names = f" ({', '.join(data.labels)})" if data.labels and len(data.labels) <= FEW else ""
            positions = f" at each of {'x'.join(map(str, targets.shape[1:]))} positions"
            return (
                f"{_count(data.classes, 'class', 'classes')}{names}{positions if targets.dim() > 1 else ''}"
            )
        numbers = outputs_for(data)
        if loss.labels:
            return f"shares of {targets.shape[1]} classes"
        if loss.name == "bce":
            if not are_flags(targets):
                return _count(numbers, "probability", "probabilities")
            return f"multi-label, {numbers} labels of 0 or 1" if numbers > 1 else "binary, a label of 0 or 1"
        if loss.name not in LOSSES:
            return f"{_count(numbers, 'number', 'numbers')} for each sample"
        return f"regression of {_count(numbers, 'number', 'numbers')}"

    def workload(self, batch_size: int) -> Workload:
        """Describe the work to layouts of the model over ranks: `batch_size` samples are behind an update."""
        return Workload(self.dataset.train, batch_size, self.objective.loss, self.objective.arithmetic)

    def measure_loss(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        """The sum of the losses of `module` over a batch / its samples, a scalar, and the losses' weight."""
        arithmetic = self.objective.arithmetic
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        return self.objective.loss.measure(arithmetic.forward(module, inputs), targets)

    def evaluate(self, part: Part | None, comm: Communicator) -> Evaluation | None:
        """Evaluate the model on `part` (collective)."""
        return None if part is None else evaluate(self.module, part, comm, self.objective).total(comm)


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


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
    objective = Objective(loss, metrics, dataset.classes, arithmetic)
    objective = check_fit(module, dataset.train, objective)
    return Task(dataset, config.model.removeprefix(OBJECT), module, count_of(module), objective)
