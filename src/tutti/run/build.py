"""From a configuration to the parts of a run, for every command that has one. Runs on every rank.

configuration ▸ data ▸ model ▸ Task ▸ portion ▸ optimizer ─┬▸ replica ▸ schedule ▸ worker ▸ Assembly
configuration ▸ resolved ▸ batches ────────────────────────┘
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tutti import models, strategies
from tutti.comm.base import Communicator
from tutti.data import Batch, Batches, DataSet, Part, Queue, SamplePool, open_pool
from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Columns
from tutti.data.parts import column_shape
from tutti.data.sampling import BALANCED, chances_of
from tutti.data.streaming import StreamedPart, decided
from tutti.data.targets import KnownClasses
from tutti.errors import BadOption, UnknownName, refuse_other
from tutti.launch.malloc import give_back_memory
from tutti.load_object import call_with_options, names_object
from tutti.model_parallel.base import Portion, Workload, count_of
from tutti.records.run import Evaluation
from tutti.records.run_folder import SeenInput, TrainedOn
from tutti.records.splits import seed_of_data
from tutti.replica import Replica
from tutti.run import summary_lines
from tutti.run.config import OBJECT, Options, TrainConfig, split_of
from tutti.run.jobs import Job
from tutti.run.optimization import build_optimizer, build_schedule, load_optimizer
from tutti.run.train_job import PARTS
from tutti.state import Saved
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace
from tutti.training.agenda import Agenda
from tutti.training.augmentations import Augmentation
from tutti.training.balance import SpeedBalance
from tutti.training.callbacks import Callbacks
from tutti.training.cuda_graph import CudaRecorder, GraphedPass, can_be_recorded
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES, named_loss, refuse_without_shares
from tutti.training.metrics import better_of, named_metrics
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit, told_of_sequences
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.stopping import Ending, Monitor
from tutti.training.targets import are_flags
from tutti.training.trainer import Trainer
from tutti.training.validation import ValidationPlan

DEFAULT_EPOCHS: Final = 20
"""Passes over the training samples, when neither epochs nor steps is given."""

FEW: Final = 5
"""Up to so many classes are told by their names."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global random generator, and put the caller's states back afterwards."""
    states = random.getstate(), np.random.get_state()
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count()) if begun else ()
    with torch.random.fork_rng(devices=gpus):
        reseed(seed, 0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def default_floats(name: str | None) -> Iterator[None]:
    """Make `name` torch's default type of floats meanwhile; None: leave it as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if name is None else getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reseed(seed: int, rank: int) -> None:
    """Seed every global random generator, for each rank differently."""
    mixed = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3, np.uint32)]
    random.seed(mixed[0])
    np.random.seed(mixed[1])
    if torch.cuda.is_available():
        torch.manual_seed(mixed[2])
    else:
        # The same without what torch notes for a GPU that may turn up: a traceback, which takes milliseconds.
        torch.default_generator.manual_seed(mixed[2])


def open_config_data(
    job: Job, comm: Communicator, pool: SamplePool | None = None, known: KnownClasses | None = None
) -> DataSet:
    """The data set of the configuration (collective); only one rank of each host reads it.

    Args:
        job: has the configuration.
        comm: all ranks.
        pool: the samples, if they are in memory already.
        known: the classes of a model that the data are for.

    Raises:
        UserError: the data or the split cannot be used.
    """
    config, options = job.config, job.config.data_options
    given: object = None
    leads = pool is None and comm.node.rank == 0
    # A data set may draw numbers for each sample.
    seeding = seeded(data_seed(config)) if leads and config.split is not None else nullcontext()
    with seeding, keeping_doubles(config.precision == "fp64"):
        if leads:
            given, options = given_data(job)
        pool = pool or open_pool(given, comm, options, known)
    place = None if config.split is None else split_of(config.split)
    found = pool.divided(comm, config.validation, config.seed, place)
    if leads and isinstance(found.train, StreamedPart):
        give_back_memory()  # Targets of many samples were checked in several times their room.
    return found


def data_seed(config: TrainConfig) -> int:
    """Return the seed of the data that a function makes: that of the data which were split, if they were."""
    if config.split is None:
        return config.seed
    found = seed_of_data(Path(split_of(config.split)[0]).expanduser())
    return config.seed if found is None else found


def given_data(job: Job) -> tuple[object, Options]:
    """Return what a run's data are to be read from, and with which options."""
    given, options = job.given("data"), job.config.data_options
    if callable(given) and not isinstance(given, Dataset):
        return call_with_options(given, options, "data set", job.config.data), {}
    return given, options


def free_given_data(job: Job, comm: Communicator) -> None:
    """Free the caller's copy of data that were given as an object, once they are open."""
    given = job.objects.get("data")
    if given is not None and (comm.node.rank == 0 or given.is_own):
        given.free()


def outputs_for(dataset: DataSet) -> int:
    """Count the outputs that a model needs: one for each class, or for each number of a target."""
    return dataset.classes or max(1, math.prod(dataset.train.stored_targets.shape[1:]))


def trained_on(dataset: DataSet, balanced: Tensor | None = None) -> TrainedOn:
    """Return what a model needs to see other data as it saw these; `balanced` has class weights by counts."""
    stored, scale, inputs = dataset.train.stored_inputs, dataset.train.scale, []
    if isinstance(stored, Columns):
        names = stored.names or [""] * len(stored.columns)
        for name, column, own in zip(names, stored.columns, scale.each, strict=True):
            shape = column_shape(column)
            inputs.append(SeenInput(name, shape, column.values is not None, own.mean, own.std, own.fill))
    return TrainedOn(
        dataset.name,
        dataset.classes,
        dataset.labels,
        () if isinstance(stored, Columns) else tuple(stored.shape[1:]),
        scale.mean,
        scale.std,
        outputs_for(dataset),
        scale.fill,
        "" if isinstance(stored, Columns) else str(stored.dtype).removeprefix("torch."),
        dataset.columns,
        tuple(inputs),
        () if balanced is None else tuple(map(tuple, balanced.reshape(len(balanced), -1).tolist())),
    )


def build_model(job: Job, dataset: DataSet) -> nn.Module:
    """The model of the configuration, with its initial weights."""
    given = job.given("model")
    reseed(job.config.seed, 0)
    if isinstance(given, str):
        # A file may draw numbers when it is imported, which happens on the rank that reads the data before.
        models.MODELS.load(given)
        reseed(job.config.seed, 0)
    return models.build(given, dataset.shape, outputs_for(dataset), job.config.model_options)


def build_strategy(job: Job, workers: int, hosts: int = 1, servers: int = 0) -> Strategy:
    """The strategy of the configuration; "auto" is solo for one worker, else sync, whose options it takes."""
    given = job.given("strategy")
    refuse_other(given, Strategy | str, "strategy", "tutti.Sync(), or a name")
    if not isinstance(given, Strategy):
        auto = "solo" if workers == 1 and not job.config.strategy_options else "sync"
        kind = strategies.named(auto if given == "auto" else given)
        known = [f.name for f in fields(kind)]
        for key in job.config.strategy_options:
            if key not in known:
                raise UnknownName("option", key, known, of=f"the strategy '{kind.name}'")
        given = kind(**job.config.strategy_options)
    given.check(workers, hosts, servers, job.config.levels)
    return given


def build_chances(job: Job, dataset: DataSet) -> Tensor | None:
    """The weights by which epochs draw the training samples; None: they take each once."""
    given = job.given("sampling")
    if given is not None and isinstance(dataset.train, StreamedPart):
        raise BadOption(
            "--sampling draws samples from anywhere, and these are streamed window by window; leave it out, "
            "use --class-weights balanced, or give --data.stream false"
        )
    return None if given is None else chances_of(given, dataset.train)


def passes_of(config: TrainConfig, strategy: Strategy) -> int:
    """Return how many forward and backward passes each worker makes for one update."""
    return config.accumulate * strategy.passes


def augmentation(job: Job, task: Task, chances: Tensor | None = None) -> Augmentation | None:
    """Return what changes the training batches, if the configuration names something."""
    config, data = job.config, task.dataset
    if config.augment is None:
        return None
    given, options = job.given("augment"), config.augment_options
    found = Augmentation(given, options, data.train, config.seed, data.classes, chances)
    if data.classes is not None and found.example.is_floating_point():
        refuse_without_shares(task.objective.loss, found.example)
    return found


def graph_of(
    config: TrainConfig, objective: Objective, replica: Replica, batches: Batches
) -> GraphedPass | None:
    """Return what computes forward and backward by a CUDA graph; None where no graph does."""
    part, loss, obstacle = batches.part, objective.loss, None
    if part.device.type != "cuda":
        obstacle = "samples that do not lie on a GPU"
    elif isinstance(batches, Queue) or batches.augment is not None or config.precision == "fp16":
        obstacle = "batches from a queue, changed samples, or fp16"
    elif loss.weighed or loss.whole or isinstance(part.stored_inputs, Columns):
        obstacle = "several inputs, or a loss that gets all outputs or has a denominator of its own"
    if obstacle is not None and config.cuda_graph == "on":
        raise BadOption(f"--cuda-graph on is not for {obstacle}; use --cuda-graph off")
    if obstacle is not None or config.cuda_graph == "off":
        return None
    if config.cuda_graph == "auto" and not can_be_recorded(replica.module, loss):
        return None
    return GraphedPass(replica, batches, objective, CudaRecorder())


def deal(
    config: TrainConfig, strategy: Strategy, part: Part, comm: Communicator, chances: Tensor | None = None
) -> tuple[Batches, SpeedBalance | None]:
    """Deal this rank its batches, with what keeps them balanced, as the configuration says (collective)."""
    own = strategy.pace is not Pace.TOGETHER
    size = config.batch_size
    batches = Batches(
        part, size, comm.rank, comm.size, passes_of(config, strategy), config.seed, own, chances
    )
    if config.balance == "queue":
        return Queue(batches, comm.counter().add), None
    return batches, SpeedBalance(batches, comm) if config.balance == "speed" else None


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
        if loss.each is not None:
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
        _, loss, weight = self.objective.compute(module, inputs, targets)
        return loss, weight

    def evaluate(self, part: Part | None, comm: Communicator) -> Evaluation | None:
        """Evaluate the model on `part` (collective)."""
        return None if part is None else evaluate(self.module, part, comm, self.objective).total(comm)


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def prepare_task(job: Job, dataset: DataSet, trained: TrainedOn | None = None) -> Task:
    """Build the model, and check that all fits; `trained` is what it was trained on, if on other data."""
    config = job.config
    arithmetic = Arithmetic(config.precision, config.layout, config.device)
    if arithmetic.has_room_for(dataset.nbytes):
        dataset = dataset.on(config.device)
    weights = class_weights_of(config, trained)
    loss = named_loss(job.given("loss"), dataset, config.loss_options, weights)
    metrics = named_metrics(job.given("metrics"), loss, dataset)
    module = arithmetic.prepare(build_model(job, dataset))
    dataset = dataset.with_parts(lambda part: told_of_sequences(part, module))
    objective = Objective(loss, metrics, dataset.classes, arithmetic)
    objective = check_fit(module, dataset.train, objective)
    return Task(dataset, config.model.removeprefix(OBJECT), module, count_of(module), objective)


def class_weights_of(config: TrainConfig, trained: TrainedOn | None) -> str | Tensor | None:
    """Return the weights of classes in the loss: balanced ones are those of what the model was trained on."""
    if config.class_weights != BALANCED or trained is None or not trained.class_weights:
        return config.class_weights
    return torch.tensor(trained.class_weights, dtype=torch.float64)


@dataclass(frozen=True)
class Assembly:
    """The parts of a training run on one rank.

    Attributes:
        config: the configuration, with all that was left open filled in.
        task: what is learned, by this rank's portion of the model.
        strategy: how the workers train.
        portion: of the model.
        workers: the ranks, and how this one steps.
        schedule: the batches, and how many updates are made with them.
        ending: when the run ends earlier, and with which weights.
        callbacks: that the user has given; None: none.
        saved: the state to go on from; None: the run begins.
    """

    config: TrainConfig
    task: Task
    strategy: Strategy
    portion: Portion
    workers: Workers
    schedule: Schedule
    ending: Ending
    callbacks: Callbacks | None
    saved: Saved | None

    def trainer(self, hooks: Hooks | None = None, agenda: Agenda | None = None) -> Trainer:
        """The trainer of the whole run."""
        part = self.task.dataset.validation
        validation = None if part is None else ValidationPlan(part, self.config.validate)
        of = self.task.objective
        return Trainer(self.workers, of, self.schedule, validation, hooks, agenda, self.ending)


def assemble(
    job: Job,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    portion: Portion,
    saved: Saved | None = None,
    ends: Callable[[], str | None] | None = None,
) -> Assembly:
    """Lay a rank's portion of the model out for training (collective).

    Args:
        job: what is to be done.
        comm: all ranks that train.
        task: what is learned.
        strategy: fits the ranks.
        portion: of the task's model.
        saved: what the run goes on from; the portion has its weights.
        ends: asked after each epoch why the run is to end with it (collective); None: nobody is.

    Raises:
        UserError: a part, or the rule of its end, cannot be made as the configuration says.
    """
    module, data, objective = portion.module, task.dataset, task.objective
    given = job.given("callbacks")
    callbacks = None if given is None else Callbacks(given, comm, module)
    told = [] if ends is None else [ends]
    told += [] if callbacks is None else [callbacks.why_end]
    monitor = Monitor.parse(job.config.monitor, better_of(objective.metrics), data.validation is not None)
    patience, target, best = job.config.patience, job.config.target, job.config.restore_best
    ending = Ending(monitor, patience, target, best, tuple(told))
    optimizer = build_optimizer(job, module)
    config = resolved(job.config, comm, task, strategy, optimizer)
    chances = build_chances(job, data)
    batches, balance = deal(config, strategy, data.train, portion.peers, chances)
    batches.augment = augmentation(job, task, chances)
    length = Schedule(batches, config.epochs, config.steps)
    replica = portion.place(strategy)
    lr = build_schedule(job, optimizer, length.updates)
    stepped = 0
    if saved is not None:
        foreign = type(strategy) not in STRATEGIES.values()
        stepped = load_optimizer(optimizer, lr, module, saved, length, foreign)
    schedule = replace(length, lr=lr, balance=balance, stepped=stepped, skip_nonfinite=config.skip_nonfinite)
    worker = portion.worker(strategy, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    workers = Workers(
        portion.peers,
        replica,
        worker,
        optimizer,
        portion.compute or graph_of(config, objective, replica, batches),
        collective=portion.compute is not None,
        everyone=comm,
        meets=strategy.pace is not Pace.FREE and portion.compute is None,
    )
    task = replace(task, module=module)
    return Assembly(config, task, strategy, portion, workers, schedule, ending, callbacks, saved)


def resolved(
    config: TrainConfig, comm: Communicator, task: Task, strategy: Strategy, optimizer: Optimizer
) -> TrainConfig:
    """The configuration with all that was left to us filled in."""
    names = ",".join(metric.name for metric in task.objective.metrics) or "none"
    # Another host may have more memory, or less, and the parts and the order of the samples are to stay.
    streamed = decided(config.data, isinstance(task.dataset.train, StreamedPart))
    return replace(
        config,
        data_options={**config.data_options, **streamed},
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
