"""A training run, from the configuration to the run folder. Runs on every rank."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from typing_extensions import override

from tutti.checkpoint.reading import Checkpoint, kept_in
from tutti.comm.base import Communicator, keep_servers
from tutti.comm.blocking import BlockingCommunicator
from tutti.data import DataSet
from tutti.data.scale import uneven
from tutti.data.streaming import StreamedPart
from tutti.errors import StateLost
from tutti.exports.sources import load_from
from tutti.launch.hangs import EPOCH_OVER, PHASES, print_stacks_when_asked
from tutti.launch.launcher import started_by
from tutti.launch.stop_request import is_supervised, stoppable
from tutti.launch.usage_sampler import Sampler, sampling
from tutti.records.folder_lock import FolderLock
from tutti.records.heartbeat import STARTING, TESTING
from tutti.records.pipeline import PipelineRecord
from tutti.records.run import EpochRecord, RunStart, Summary, World, now, ranks_in_turn
from tutti.records.run_folder import PREDICTIONS, RATES, WEIGHTS, RunFolder, TrainedOn, check_writable
from tutti.records.texts import resumed_text
from tutti.run import summary_lines
from tutti.run.build import (
    Assembly,
    free_given_data,
    open_config_data,
    prepare_task,
    reseed,
    seeded,
    trained_on,
)
from tutti.run.checks import check_recipe
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe, load_job
from tutti.run.optimization import build_optimizer
from tutti.run.picked_rate import pick_rate
from tutti.run.restore import found_by, history_of, laid_out, not_restored, refuse_shorter
from tutti.run.resume import way_on
from tutti.run.saving import Recording, Saving, observed, saving
from tutti.run.shared_data import SharedData
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.state import in_own_memory
from tutti.strategies import Clip, Strategy
from tutti.strategies.base import WeightPlacement
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place
from tutti.terminal import warn_on_stderr
from tutti.training.batch_norm import batch_norms
from tutti.training.intervals import AUTO
from tutti.training.loggers import Logbook, logger_names, loggers_of
from tutti.training.losses import weights_in
from tutti.training.losses.weights import BALANCED
from tutti.training.prediction import predict, predictions_of
from tutti.training.progress import Progress, Several, progress_on
from tutti.training.range_test import RangeTest, drawing
from tutti.training.run_parts import Hooks
from tutti.training.trainer import Trainer
from tutti.training.weights import refuse_unstorable, weights_to_bytes

R = TypeVar("R")


GONE_S: Final = 10.0
"""The time that a killed process may take to be gone."""


@dataclass(frozen=True)
class RunContext:
    """The parts that a run shares with others, if it is one of many."""

    follower: Progress = field(default_factory=Progress)  # of each rank
    open_data: Callable[[Recipe, Communicator], DataSet] = open_config_data  # collective
    # Returns after each epoch why the run is to end with it (collective over the workers).
    ends: Callable[[Communicator], str | None] | None = None
    # The only run. Else the caller samples cores and memory, and flushes files (`finish_together`).
    alone: bool = True
    on_step: Callable[[int], None] | None = None  # with the number of updates made before


class Pulse(Progress):
    """The sign of life of a rank outside training, which may take any time."""

    def __init__(self, comm: BlockingCommunicator) -> None:
        self._peers = comm.peers

    @override
    def doing(self, what: str, step: int | None = None) -> None:
        self._peers.publish_phase(list(PHASES).index(what))

    @override
    def epoch(self, record: EpochRecord) -> None:
        self.doing(EPOCH_OVER)

    @override
    def end(self) -> None:
        self.doing(EPOCH_OVER)


def work(comm: Communicator, payload: bytes) -> RunOutcome:
    """Train, or serve the workers; every rank calls this (entry point of the ranks)."""
    job = load_job(payload, TrainJob)
    context = RunContext()
    data = job.data if job.data is not None or job.memory is None else job.memory.data
    if data is not None and comm.hosts == 1:
        context = replace(context, open_data=SharedData(data, one_run=True).open)
    # A process that tutti has not started, itself or by mpirun, is not watched.
    if isinstance(comm, BlockingCommunicator) and is_supervised():
        pulse = Pulse(comm)
        if job.hang_timeout_s is not None:
            print_stacks_when_asked()
            if comm.rank < comm.size - job.config.servers:  # Servers have no phases.
                pulse.doing(STARTING)
        context = replace(context, follower=pulse, on_step=comm.peers.publish_steps)
    return train(comm, job, context)


def train(comm: Communicator, job: TrainJob, context: RunContext) -> RunOutcome:
    """Train, or serve the workers (collective over all ranks of the job, servers included)."""
    config = job.config
    if job.write and job.resume is None and comm.rank == 0 and context.alone:
        check_writable(config.out)
    checkpoint = None if job.memory is None else kept_in(comm, job.memory)
    if checkpoint is None and job.resume is not None:
        checkpoint = found_by(comm, job.resume)
    if config.lr == AUTO and checkpoint is not None:
        config = replace(config, lr=checkpoint.facts["config"]["lr"])
        job = replace(job, config=config)
    with seeded(config.seed):
        strategy = check_recipe(job, comm.size, comm.hosts)
        recording = Recording(comm, job.trace)
        team = keep_servers(recording.comm, config.servers, config.levels, config.server_period)
        # All ranks, the workers first, with their numbers among the workers.
        crew = team if team.servers is None else team.servers.comm
        with sampling(crew, job.write and context.alone) as sampler:
            dataset = context.open_data(job, comm)
            if job.memory is None or comm.hosts == 1:  # Else later ranks read them again.
                free_given_data(job, comm)
            task = prepare_task(job, dataset)
            if config.weights is not None and checkpoint is None:
                load_from(Path(config.weights), task.module, comm.rank == 0)

            tested = None
            if config.lr == AUTO:
                serves = team.servers is not None and team.servers.serving
                tested = result_for_all(recording.comm, team, None if serves else pick_rate(job, team, task))
                job = replace(job, config=replace(config, lr=tested.rate))

            def fit() -> RunOutcome:
                ends = None if context.ends is None else partial(context.ends, team)
                with laid_out(job, team, task, strategy, checkpoint, ends) as parts:
                    reseed(config.seed, 1 + parts.portion.peers.rank)
                    start = _start_of(job, team, parts, checkpoint)
                    if tested is not None:
                        start = replace(start, lr_why=tested.why)
                    return FittedRun(job, team, parts, context, sampler, recording, start, tested).execute()

            outcome = work_or_serve(job, team, task.module, strategy, fit)
        lines = recording.save(outcome.folder if outcome is not None else None)
        if lines and not job.quiet:
            print(*lines, sep="\n", flush=True)
        return result_for_all(recording.comm, team, outcome)


def _start_of(job: TrainJob, comm: Communicator, parts: Assembly, checkpoint: Checkpoint | None) -> RunStart:
    """Describe how the run begins, or continues (collective)."""
    start = RunStart(
        now(),
        World(comm.size, comm.hosts, torch.get_num_threads()),
        batch_size=parts.config.batch_size,
        lr=parts.config.rate,
    )
    if checkpoint is not None and parts.saved is not None:
        refuse_shorter(checkpoint, parts.saved, parts.schedule)
        lost = tuple(not_restored(parts.saved, parts.workers.worker))
        start = replace(start, step=checkpoint.step, anew=lost)
        if comm.rank == 0 and not job.quiet:
            print(resumed_text(start), flush=True)
    return replace(start, why=job.takeover if comm.rank == 0 else "")


def work_or_serve(
    recipe: Recipe, team: Communicator, module: nn.Module, strategy: Strategy, work: Callable[[], R]
) -> R | None:
    """Return the result of a worker's `work`; None on a server, which serves until the workers are done."""
    servers, config = team.servers, recipe.config
    if servers is None or not servers.serving:
        return work()
    assert isinstance(strategy, Centred), "others are refused with servers"
    optimizer = build_optimizer(recipe, module)
    replica = place(module, team, WeightPlacement.PRIVATE)
    # A request to stop may reach all ranks; the workers act on it.
    with stoppable():
        strategy.serve(servers, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    return None


def result_for_all(comm: Communicator, team: Communicator, result: R | None) -> R:
    """Return the result of this rank: a worker's own, on a server rank 0's (collective over all ranks).

    All ranks of a program that mpirun started then return the same, and servers do not leave before workers.
    """
    first = result if team is comm else comm.broadcast_object(result)
    return cast("R", first if result is None else result)


@dataclass(frozen=True)
class FittedRun:
    """A run with all its parts, on a rank that trains."""

    job: TrainJob
    comm: Communicator
    parts: Assembly
    context: RunContext
    sampler: Sampler | None
    recording: Recording
    start: RunStart
    tested: RangeTest | None = None  # the range test that has picked the rate

    def execute(self) -> RunOutcome:
        """Train, evaluate, write and print (collective)."""
        job, comm, data = self.job, self.comm, self.parts.task.dataset
        if job.write:
            refuse_unstorable(self.parts.task.module)
        if self._speaks and not job.takeover:
            _print_beginning(self.parts, self.start.lr_why)
        names, weights = logger_names(job.config.log), dict[str, Any]()
        with (
            _run_folder(self) as folder,
            saving(
                comm,
                self.parts,
                folder,
                job.memory,
                job.deadline,
                write=job.write,
                resumed=job.resume is not None and not job.resume.again,
            ) as saver,
            Logbook(loggers_of(folder, names) if folder else {}, self._config.as_json()) as book,
            # The others wait for rank 0 here, not in their first step: loggers take seconds to begin.
            observed(comm, folder, self.sampler, wanted=job.write) as heartbeat,
        ):
            trainer = self._trainer(folder, saver, book, heartbeat, weights)
            with stoppable(goes_on=job.memory is not None) if job.write else nullcontext():
                history = trainer.fit(self.parts.saved)
                comm.barrier()
            outcome = RunOutcome(
                self._config,
                history,
                None,
                None if folder is None else str(folder.path),
                self.trained_on,
                None,
            )
            if trainer.course.stopped is not None:
                assert saver is not None, "nothing else stops a run"
                return self._stopped(outcome, trainer.course.stopped, saver, book)
            heartbeat.doing(TESTING)
            summary = self._judge(trainer, history)
            self._predict(folder)
            pipeline = self.parts.portion.record()
            if folder is not None:
                if pipeline is not None:
                    folder.write(pipeline)
                summary = replace(summary, ranks_in_turn=ranks_in_turn(folder.lines(RunStart).records))
                folder.write(summary)
                book.finish(summary)
        outcome = replace(outcome, summary=summary)
        if self._speaks:
            _print_end(outcome, summary, data, pipeline)
        if not job.bring_weights:
            return outcome
        callbacks = self.parts.callbacks
        noted = () if callbacks is None else tuple(callbacks.attributes())
        return replace(outcome, weights=in_own_memory(weights), callbacks=noted)

    @property
    def trained_on(self) -> TrainedOn:
        """The facts that other data need to be treated like the training data."""
        loss = self.parts.task.objective.loss
        of_classes = weights_in(loss) if self._config.class_weights == BALANCED else None
        return trained_on(self.parts.task.dataset, of_classes, loss.units is not None)

    @property
    def _speaks(self) -> bool:
        return self.comm.rank == 0 and not self.job.quiet

    @property
    def _config(self) -> TrainConfig:
        # A run that repeats this one writes its own folder.
        return replace(self.parts.config, out=None)

    def _trainer(
        self,
        folder: RunFolder | None,
        saver: Saving | None,
        book: Logbook,
        heartbeat: Progress,
        weights: dict[str, Any],
    ) -> Trainer:
        """Return the trainer with its observers; `weights` gets the trained weights."""

        def keep() -> None:
            weights.update(self.parts.portion.state())
            if folder is not None:
                folder.write_file(WEIGHTS, weights_to_bytes(weights))

        # mpirun gives its ranks a terminal even where what they print goes into a file.
        bar, quiet = not started_by().given, self.job.quiet
        shown = Progress()
        if self.job.bar or not quiet:
            shown = progress_on(sys.stdout, self.comm.rank, bar, self.job.notebook, quiet)
        hooks = Hooks(
            Several(shown, heartbeat, self.context.follower),
            book.epoch,
            self.context.on_step,
            keep,
            None if saver is None else saver.save,
            self.recording.trace,
            self.parts.callbacks,
        )
        earlier = [] if self.parts.saved is None else history_of(self.parts.saved)
        if self.job.resume is not None:
            book.go_on(earlier)
        return self.parts.trainer(hooks, None if saver is None else saver.agenda)

    def _stopped(self, outcome: RunOutcome, why: str, saver: Saving, book: Logbook) -> RunOutcome:
        """Return the outcome of a run that will be resumed."""
        if saver.lost:
            raise StateLost(
                "the run has stopped, but its state could not be saved, as the warning above says; fix "
                "that, and resume the run from the checkpoint before"
            )
        book.stop()
        if self._speaks:
            way = way_on(outcome.folder, self.job.objects, self.job.config)
            print(summary_lines.stopped(why, saver.step, way), flush=True)
        return replace(outcome, stopped=why)

    def _judge(self, trainer: Trainer, history: list[EpochRecord]) -> Summary:
        """Evaluate the final model (collective)."""
        task, monitor = self.parts.task, self.parts.ending.monitor
        best = trainer.course.restored or monitor.best(history)
        test = task.evaluate(task.dataset.test, self.parts.workers.comm)
        return replace(
            Summary.of(history, test, task.parameters, self.start.world),
            validation=trainer.course.final,
            ended_early=trainer.course.ended,
            best_epoch=None if best is None else best.epoch,
            best_by=str(monitor),
            restored=trainer.course.restored is not None,
        )

    def _predict(self, folder: RunFolder | None) -> None:
        """Write predictions of the validation part, if requested (collective)."""
        task, part = self.parts.task, self.parts.task.dataset.validation
        if not self._config.predictions or part is None:
            return
        outputs = predict(task.module, part, self.parts.workers.comm, task.objective.arithmetic)
        if folder is not None and outputs is not None:
            loss = task.objective.loss
            predictions = predictions_of(part, loss.in_units(outputs), loss.ignored)
            folder.write_file(PREDICTIONS, predictions.as_bytes())


@contextmanager
def _run_folder(run: FittedRun) -> Iterator[RunFolder | None]:
    """Yield the run folder, with the facts known before training; None on the ranks that do not write."""
    job, context, task, config = run.job, run.context, run.parts.task, run._config
    if run.comm.rank or not job.write:
        yield None
        return
    if job.resume is not None:
        folder = RunFolder(job.resume.folder)
    elif context.alone:
        folder = RunFolder.create(job.config.out, task.name, task.dataset.name)
    else:
        folder = RunFolder.take(cast("str", job.config.out))
    if job.memory is not None:
        # At once: later ranks must know the folder, whenever these are lost.
        job.memory.note_folder(folder.path.absolute())
    # Lost ranks may not be gone yet, though they no longer write.
    with FolderLock(folder.path, GONE_S if job.takeover else 0.0) as lock:
        if lock.problem is not None:
            warn_on_stderr(
                f"the file system of {folder.path} has no locks ({lock.problem}); see to it that no other "
                "job is given this folder"
            )
        if job.resume is not None:
            folder.begin_again()
        if run._speaks and not job.takeover:
            print(f"run folder: {folder.path}", flush=True)  # A run that loses a rank continues there.
        folder.write_config(config.as_json())
        folder.write(run.trained_on)
        folder.append(run.start, flush=not job.takeover)
        if run.tested is not None and run.tested.losses:
            folder.write_file(RATES, drawing(run.tested).encode())
        yield folder


def _print_beginning(parts: Assembly, lr_why: str) -> None:
    task, train = parts.task, parts.task.dataset.train
    together = not parts.schedule.batches.own
    print(task.described(), summary_lines.training(parts.config, together), sep="\n", flush=True)
    if lr_why:
        print(lr_why, flush=True)
    watched = parts.ending.patience is not None or parts.ending.restores_best
    if watched and parts.config.monitor is None and parts.task.dataset.validation is None:
        print(f"monitor: {parts.ending.monitor}, as no samples are kept for validation", flush=True)
    alone = parts.workers.comm.size > 1 and parts.workers.statistics is None
    if alone and parts.config.batch_norm == "sync" and batch_norms(parts.task.module):
        print(summary_lines.own_statistics(parts.config), flush=True)
    if isinstance(train, StreamedPart):
        each, windows = train.sample_bytes, train.windows
        print(
            f"streaming {len(train) * each / 1e9:.2f} GB in windows of {windows.window * each / 1e6:.1f} "
            f"MB; a batch draws from {windows.window / windows.samples:.2%} of the samples",
            flush=True,
        )
        return
    advice = uneven(train)
    if advice is not None:
        warn_on_stderr(advice)


def _print_end(
    outcome: RunOutcome, summary: Summary, dataset: DataSet, pipeline: PipelineRecord | None
) -> None:
    lines = [*summary_lines.result(summary, dataset.labels), *summary_lines.exchanges(outcome.history)]
    if pipeline is not None:
        lines.append(summary_lines.bubble(pipeline))
    if outcome.folder is not None:
        lines.append(f"results: tutti report {shlex.quote(outcome.folder)}")
    print(*lines, sep="\n", flush=True)
