"""From a configuration to the parts of a run, for every command that needs one. Runs on every rank.

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
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tutti import models, strategies
from tutti.comm.base import Communicator, Group
from tutti.data import Batch, Batches, DataSet, Part, Queue, SamplePool, open_pool
from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Columns
from tutti.data.parts import column_shape
from tutti.data.sampling import BALANCED, chances_of
from tutti.data.schemas import reading_shown
from tutti.data.sources import like_training
from tutti.data.streaming import StreamedPart, decided
from tutti.data.targets import KnownClasses, meant_by
from tutti.errors import BadOption, UnknownName, refuse_other
from tutti.launch.runtime_settings import give_back_memory
from tutti.load_object import call_with_options, names_object
from tutti.model_parallel.base import Portion, Workload, count_of
from tutti.records.preparation import table_of
from tutti.records.run import Evaluation
from tutti.records.run_folder import WEIGHTS, RunFolder, SeenInput, TrainedOn, run_of
from tutti.records.splits import seed_of_data
from tutti.replica import Replica
from tutti.run import summary_lines
from tutti.run.config import DEFAULT_EPOCHS, OBJECT, Options, TrainConfig, split_of
from tutti.run.jobs import Recipe
from tutti.run.optimization import build_optimizer, build_schedule, load_optimizer
from tutti.run.train_job import PARTS, TrainJob
from tutti.state import Saved
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace, Worker
from tutti.training.agenda import Agenda
from tutti.training.augmentations import Augmentation
from tutti.training.balance import SpeedBalance
from tutti.training.batch_norm import BatchStatistics, batch_norms
from tutti.training.callbacks import Callbacks
from tutti.training.cuda_graph import CudaRecorder, GraphedPass, can_be_recorded
from tutti.training.evaluation import ForwardPass, Objective, evaluate
from tutti.training.intervals import AUTO, Averaging
from tutti.training.losses import named_loss
from tutti.training.metrics import better_of, named_metrics
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit, told_of_sequences
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.stopping import Ending, Goal, Monitor
from tutti.training.targets import are_flags
from tutti.training.trainer import Trainer
from tutti.training.validation import ValidationPlan


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global random generator, and restore the caller's states afterwards."""
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


def reseed(seed: int, rank: int) -> None:
    """Seed every global random generator, for each rank differently."""
    mixed = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3, np.uint32)]
    random.seed(mixed[0])
    np.random.seed(mixed[1])
    if torch.cuda.is_available():
        torch.manual_seed(mixed[2])
    else:
        # The same without the traceback that torch records for a later GPU, which takes milliseconds.
        torch.default_generator.manual_seed(mixed[2])


def open_config_data(
    recipe: Recipe,
    comm: Communicator,
    pool: SamplePool | None = None,  # the samples, if they are in memory already
    known: KnownClasses | None = None,  # the classes of a model that uses the data
    options: Options | None = None,  # in place of the configuration's
    trained: TrainedOn | None = None,  # whose preparation is applied; None: of the run's first weights
) -> DataSet:
    """Open the data set of the configuration (collective); only one rank of each host reads it."""
    config = recipe.config
    if trained is None and (config.weights is not None or _resumed(recipe) is not None):
        data = comm.broadcast_object(weights_data(recipe) if comm.rank == 0 else None)
        trained = cast("TrainedOn | None", data)
        options = options or options_of_weights(recipe, trained)
    given: object = None
    leads = pool is None and comm.node.rank == 0
    # A data set may draw numbers for each sample.
    seed = data_seed(config)
    seeding = seeded(seed) if leads and seed != config.seed else nullcontext()
    shows = leads and comm.rank == 0 and not getattr(recipe, "quiet", False)
    with seeding, keeping_doubles(config.precision == "fp64"), reading_shown(config.data, shows):
        own: Options = {}
        if leads:
            given, own = given_data(recipe)
        options = own if options is None else options
        pool = pool or open_pool(given, comm, options, known or meant_by(config.loss))
    place = None if config.split is None else split_of(config.split)
    embeds = pool.dataset.table is not None and models.takes_table(recipe.given("model"))
    before = None if trained is None else trained.preparation
    if trained is not None and before is None and pool.dataset.table is not None:
        raise BadOption(
            "the model was trained on numbers as they are, which would be prepared here; give --data.prepare "
            "off"
        )
    dataset = pool.divided(comm, config.validation, seed, place, embeds, before, config.test)
    if leads and isinstance(dataset.train, StreamedPart):
        give_back_memory()  # The check of many targets takes several times their memory.
    return dataset


def _resumed(recipe: Recipe) -> Path | None:
    """Return the folder of the resumed run."""
    resume = recipe.resume if isinstance(recipe, TrainJob) else None
    return None if resume is None else resume.folder


def options_of_weights(recipe: Recipe, trained: TrainedOn | None) -> Options | None:
    """Return the options for reading data for the initial weights of a run; None: its own."""
    config = recipe.config
    begins = config.weights is not None and _resumed(recipe) is None
    if not begins or trained is None or trained.preparation is None:
        return None
    table = table_of([trained.preparation])
    return like_training(config.data, config.data_options, trained.columns, table)


def weights_data(recipe: Recipe) -> TrainedOn | None:
    """Return the training data of a run's initial weights; None: unknown."""
    place = _resumed(recipe) or Path(recipe.config.weights or "")
    return RunFolder(place.parent if place.name == WEIGHTS else run_of(place)[0]).find(TrainedOn)


def data_seed(config: TrainConfig) -> int:
    """Return the seed of the held-out parts, and of data that a function makes."""
    seed = None if config.split is None else seed_of_data(Path(split_of(config.split)[0]).expanduser())
    # All workers of a `tutti centre` hold out the same samples.
    own = 0 if config.strategy_options.get("centre") else config.seed
    return own if seed is None else seed


def given_data(recipe: Recipe) -> tuple[object, Options]:
    """Return the source of a run's data, and the options for reading it."""
    given, options = recipe.given("data"), recipe.config.data_options
    if callable(given) and not isinstance(given, Dataset):
        return call_with_options(given, options, "data set", recipe.config.data), {}
    return given, options


def free_given_data(recipe: Recipe, comm: Communicator) -> None:
    """Free the caller's copy of data given as an object, once they are open."""
    given = recipe.objects.get("data")
    if given is not None and (comm.node.rank == 0 or given.is_own):
        given.free()


def outputs_for(dataset: DataSet) -> int:
    """Count the outputs that a model needs: one for each class, or for each number of a target."""
    return dataset.classes or max(1, math.prod(dataset.train.stored_targets.shape[1:]))


def trained_on(dataset: DataSet, balanced: Tensor | None = None, scaled: bool = True) -> TrainedOn:
    """Return the facts that a model needs to treat other data like these."""
    stored, scale, inputs = dataset.train.stored_inputs, dataset.train.scale, []
    preparation = scale.preparation
    if isinstance(stored, Columns):
        names = stored.names or [""] * len(stored.columns)
        for name, column, own in zip(names, stored.columns, scale.each, strict=True):
            shape = column_shape(column)
            inputs.append(SeenInput(name, shape, column.values is not None, own.mean, own.std, own.fill))
    return TrainedOn(
        dataset.name,
        dataset.classes,
        dataset.labels,
        () if isinstance(stored, Columns) else scale.shape(tuple(stored.shape[1:])),
        scale.mean,
        scale.std,
        outputs_for(dataset),
        scale.fill,
        "" if isinstance(stored, Columns) else str(stored.dtype).removeprefix("torch."),
        dataset.columns,
        tuple(inputs),
        () if balanced is None else tuple(map(tuple, balanced.reshape(len(balanced), -1).tolist())),
        preparation if scaled or preparation is None else replace(preparation, units=None),
    )


def build_model(recipe: Recipe, dataset: DataSet) -> nn.Module:
    """Build the model of the configuration, with its initial weights."""
    given, config = recipe.given("model"), recipe.config
    if isinstance(given, str):
        models.MODELS.load(given)  # A file may draw numbers when it is imported.
    reseed(config.seed, 0)
    outputs = outputs_for(dataset)
    return models.build(given, dataset.shape, outputs, config.model_options, dataset.table_inputs)


def build_strategy(recipe: Recipe, workers: int, hosts: int = 1, servers: int = 0) -> Strategy:
    """Build the strategy of the configuration; "auto" is solo for one worker without options, else sync."""
    given, config = recipe.given("strategy"), recipe.config
    refuse_other(given, Strategy | str, "strategy", "tutti.Sync(), or a name")
    if not isinstance(given, Strategy):
        auto = "solo" if workers == 1 and not config.strategy_options else "sync"
        kind = strategies.named(auto if given == "auto" else given)
        known = [f.name for f in fields(kind)]
        for key in config.strategy_options:
            if key not in known:
                raise UnknownName("option", key, known, of=f"the strategy '{kind.name}'")
        given = kind(**config.strategy_options)
    given.check(workers, hosts, servers, config.levels)
    return given


def build_chances(recipe: Recipe, dataset: DataSet) -> Tensor | None:
    """Return the weights by which epochs draw the training samples; None: they take each once."""
    given = recipe.given("sampling")
    if given is not None and isinstance(dataset.train, StreamedPart):
        raise BadOption(
            "--sampling draws samples from anywhere, and these are streamed window by window; leave it out, "
            "use --class-weights balanced, or give --data.stream false"
        )
    return None if given is None else chances_of(given, dataset.train)


def passes_of(config: TrainConfig, strategy: Strategy) -> int:
    """Return how many forward and backward passes each worker makes for one update."""
    return config.accumulate * strategy.passes


def augmentation(recipe: Recipe, part: Part) -> Augmentation | None:
    """Return the transforms of the training batches, if the configuration names some."""
    config = recipe.config
    if config.augment is None:
        return None
    return Augmentation(recipe.given("augment"), config.augment_options, part, config.seed)


def graph_of(
    config: TrainConfig, objective: Objective, replica: Replica, batches: Batches
) -> GraphedPass | None:
    """Return a pass that runs as a CUDA graph; None if no graph fits."""
    part, loss = batches.part, objective.loss
    fits = (
        part.device.type == "cuda"
        and not (isinstance(batches, Queue) or batches.augment is not None or config.precision == "fp16")
        and not (loss.weighed or loss.whole or isinstance(part.stored_inputs, Columns))
    )
    if not fits and config.cuda_graph == "on":
        raise BadOption(
            "--cuda-graph on is for samples of one input on a GPU, batches that nothing changes, and a loss "
            "of each sample; use --cuda-graph off"
        )
    if not fits or config.cuda_graph == "off":
        return None
    if config.cuda_graph == "auto" and not can_be_recorded(replica.module, loss):
        return None
    return GraphedPass(replica, batches, objective, CudaRecorder())


def deal(
    config: TrainConfig,
    strategy: Strategy,
    part: Part,
    comm: Communicator,
    chances: Tensor | None = None,
    group: Group | None = None,
) -> tuple[Batches, SpeedBalance | None]:
    """Deal this rank its batches, and return them with their balance (collective)."""
    own = strategy.pace is not Pace.TOGETHER
    size, passes = config.batch_size, passes_of(config, strategy)
    workers, team = (comm, (0, 1)) if group is None else (group.lane, (group.ranks.rank, group.ranks.size))
    batches = Batches(
        part, size, workers.rank, workers.size, passes, config.seed, own, chances=chances, team=team
    )
    if config.balance == "queue":
        return Queue(batches, comm.counter().add), None
    return batches, SpeedBalance(batches, comm) if config.balance == "speed" else None


@dataclass(frozen=True)
class Task:
    """Data, model, loss and metrics: a run without its way of training."""

    dataset: DataSet
    name: str  # of the model
    module: nn.Module
    parameters: int  # trainable numbers
    objective: Objective

    def described(self) -> str:
        """Describe model, data and task, in a line each."""
        data, of = self.dataset, self.objective
        parts = {name: len(part) for name in PARTS if (part := getattr(data, name)) is not None}
        sizes = summary_lines.counts(self.name, self.parameters, data.name, parts, data.shape)
        table = data.train.scale.preparation
        sizes += "" if table is None else f"\n{summary_lines.table(table)}"
        noun = "number"
        if data.classes:
            noun = "class"
        elif of.loss.flags and are_flags(data.train.targets):
            noun = "label of 0 or 1"
        kind = summary_lines.kind_of_task(noun, outputs_for(data), data.labels)
        loss = f"{of.loss.name} of one-hot labels" if of.loss.one_hot else of.loss.name
        loss += ", weighted by sample" if of.weighted else ""
        return f"{sizes}\n{summary_lines.task(kind, loss, [one.name for one in of.metrics])}"

    def workload(self, batch_size: int) -> Workload:
        """Describe the work for layouts of the model over ranks."""
        return Workload(self.dataset.train, batch_size, self.objective.loss, self.objective.arithmetic)

    def forward(self, module: nn.Module, batch: Batch) -> ForwardPass:
        """Compute the outputs of `module` for a batch, and their loss."""
        arithmetic = self.objective.arithmetic
        inputs, targets = arithmetic.inputs(batch.inputs), arithmetic.targets(batch.targets)
        return self.objective.compute(module, inputs, targets, batch.weights)

    def evaluate(self, part: Part | None, comm: Communicator) -> Evaluation | None:
        """Evaluate the model on `part` (collective)."""
        return None if part is None else evaluate(self.module, part, comm, self.objective).total(comm)


def prepare_task(recipe: Recipe, dataset: DataSet, trained: TrainedOn | None = None) -> Task:
    """Build the model, and check that all parts fit; `trained` are its training data, if other ones."""
    config = recipe.config
    if config.predictions and dataset.validation is None:
        raise BadOption(
            "--predictions is for the validation part, and there is none; give --validation a share, or "
            "--split"
        )
    arithmetic = Arithmetic(config.precision, config.layout, config.device)
    if arithmetic.has_room_for(dataset.nbytes):
        dataset = dataset.on(config.device)
    weights = class_weights_of(config, trained)
    loss = named_loss(recipe.given("loss"), dataset, config.loss_options, weights)
    metrics = named_metrics(recipe.given("metrics"), loss, dataset)
    module = arithmetic.prepare(build_model(recipe, dataset))
    dataset = dataset.with_parts(lambda part: told_of_sequences(part, module))
    objective = Objective(loss, metrics, dataset.classes, arithmetic, dataset.weighted)
    by_value = any(isinstance(one, int) for one in dataset.labels)
    objective = check_fit(module, dataset.train, objective, by_value=by_value)
    return Task(dataset, config.model.removeprefix(OBJECT), module, count_of(module), objective)


def class_weights_of(config: TrainConfig, trained: TrainedOn | None) -> str | Tensor | None:
    """Return the class weights of the loss: balanced ones are those of the model's training data."""
    if config.class_weights != BALANCED or trained is None or not trained.class_weights:
        return config.class_weights
    return torch.tensor(trained.class_weights, dtype=torch.float64)


@dataclass(frozen=True)
class Assembly:
    """The parts of a training run on one rank."""

    config: TrainConfig  # with everything that was left open filled in
    task: Task  # learned by this rank's portion of the model
    strategy: Strategy
    portion: Portion
    workers: Workers
    schedule: Schedule
    ending: Ending
    callbacks: Callbacks | None  # None: the user has given none
    saved: Saved | None  # the state to continue from; None: the run begins

    def trainer(self, hooks: Hooks | None = None, agenda: Agenda | None = None) -> Trainer:
        """Return the trainer of the whole run."""
        part = self.task.dataset.validation
        validation = None if part is None else ValidationPlan(part, self.config.validate)
        of = self.task.objective
        return Trainer(self.workers, of, self.schedule, validation, hooks, agenda, self.ending)


def assemble(
    recipe: Recipe,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    portion: Portion,
    saved: Saved | None = None,
    ends: Callable[[], str | None] | None = None,
) -> Assembly:
    """Lay a rank's portion of the model out for training (collective).

    The portion already has the weights of `saved`. `ends` returns after each epoch why the run is to end with
    it (collective).
    """
    module, data, objective = portion.module, task.dataset, task.objective
    given = recipe.given("callbacks")
    callbacks = None if given is None else Callbacks(given, comm, module)
    told = [] if ends is None else [ends]
    told += [] if callbacks is None else [callbacks.why_end]
    optimizer = build_optimizer(recipe, module)
    config = resolved(recipe.config, comm, task, strategy, optimizer)
    better, validated = better_of(objective.metrics), data.validation is not None
    monitor = Monitor.parse(config.monitor, better, validated)
    goal = None if config.goal is None else Goal.parse(config.goal, monitor, better, validated)
    average = None if config.average is None else Averaging.parse(config.average)
    ending = Ending(monitor, config.patience, goal, config.restore_best, average, tuple(told))
    chances = build_chances(recipe, data)
    batches, balance = deal(config, strategy, data.train, portion.peers, chances, portion.group)
    batches.augment = augmentation(recipe, data.train)
    length = Schedule(batches, config.epochs, config.steps)
    replica = portion.place(strategy)
    scheduler = build_schedule(recipe, optimizer, length.updates)
    stepped = 0
    if saved is not None:
        foreign = type(strategy) not in STRATEGIES.values()
        stepped = load_optimizer(optimizer, scheduler, module, saved, length, foreign)
    schedule = replace(
        length, scheduler=scheduler, balance=balance, stepped=stepped, skip_nonfinite=config.skip_nonfinite
    )
    worker = portion.worker(strategy, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    group = None if portion.group is None else portion.group.ranks
    statistics = None
    if _normalises_together(config, portion, strategy, worker):
        statistics = BatchStatistics(group or portion.peers)
    workers = Workers(
        portion.peers,
        replica,
        worker,
        optimizer,
        portion.compute or graph_of(config, objective, replica, batches),
        collective=portion.compute is not None,
        everyone=comm,
        group=group,
        statistics=statistics,
        meets=strategy.pace is not Pace.FREE and portion.compute is None,
    )
    task = replace(task, module=module)
    return Assembly(config, task, strategy, portion, workers, schedule, ending, callbacks, saved)


def _normalises_together(config: TrainConfig, portion: Portion, strategy: Strategy, worker: Worker) -> bool:
    """Return whether BatchNorm uses the statistics of the whole batch, which several ranks share."""
    together = (strategy.pace is Pace.TOGETHER and worker.waits) or portion.group is not None
    return (
        config.batch_norm == "sync"
        and together
        and config.parallel is None
        and portion.peers.size > 1
        and portion.peers.in_backward
        and bool(batch_norms(portion.module))
    )


def resolved(
    config: TrainConfig, comm: Communicator, task: Task, strategy: Strategy, optimizer: Optimizer
) -> TrainConfig:
    """Return the configuration with all open choices filled in."""
    names = ",".join(metric.name for metric in task.objective.metrics) or "none"
    # Another host may have more or less memory, but the parts and the order of the samples must stay.
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
        lr=config.lr if config.lr == AUTO else float(optimizer.param_groups[0]["lr"]),
        loss=task.objective.loss.name if config.loss == "auto" else config.loss,
        metrics=names if config.metrics == "auto" else config.metrics,
    )
