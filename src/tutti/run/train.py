"""A training run, from the configuration to the run folder. Runs on every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch._dynamo  # The first optimizer imports it, for a second: better before the ranks are forked.
from torch import Tensor, nn

from tutti.checkpoint.in_memory import kept_in
from tutti.checkpoint.reading import Checkpoint
from tutti.comm.base import Communicator
from tutti.comm.blocking import BlockingCommunicator
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import Batches, DataSet, Queue
from tutti.data.columns import Columns
from tutti.data.streaming.part import StreamedPart
from tutti.data.streaming.quality import quality_of
from tutti.errors import BadOption, StateLost
from tutti.exports.sources import load_from
from tutti.launch.guard import JOB
from tutti.launch.hangs import print_stacks_when_asked
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.stop_request import stoppable
from tutti.launch.usage_sampler import Sampler, sampling
from tutti.model_parallel.base import Whole
from tutti.optim.attribute_memory import memory_of
from tutti.records.folder_lock import FolderLock
from tutti.records.heartbeat import TESTING
from tutti.records.pipeline import PipelineRecord
from tutti.records.run import EpochRecord, RunStart, Summary, World, now, ranks_in_turn
from tutti.records.run_folder import RunFolder, StrategyFacts, check_writable
from tutti.records.texts import resumed_text
from tutti.replica import Replica
from tutti.run import summary_lines
from tutti.run.build import (
    Assembly,
    Task,
    callbacks_of,
    default_floats,
    open_config_data,
    outputs_for,
    prepare_task,
    reseed,
    seeded,
    trained_on,
)
from tutti.run.checks import check_predictions, check_strategy
from tutti.run.config import NEEDS_GPU_SAMPLES, TrainConfig
from tutti.run.jobs import load_job
from tutti.run.kept_data import KeptData
from tutti.run.recording import Recording, observed
from tutti.run.reserve import open_beside_others, until_needed
from tutti.run.restore import anew, found_by, history_of, laid_out, refuse_shorter
from tutti.run.resume import way_on
from tutti.run.rollback import take_back_after_me
from tutti.run.saving import refuse_over, saving
from tutti.run.servers import result_for_all, take_sides, work_or_serve
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.run.trust import seal
from tutti.state import Saved, in_own_memory
from tutti.strategies import Strategy
from tutti.training.callbacks import Callbacks
from tutti.training.cuda_graph import CudaRecorder, GraphedPass, can_be_recorded
from tutti.training.evaluation import Objective
from tutti.training.loggers import logger_names, loggers_of
from tutti.training.loggers.base import Logbook
from tutti.training.losses import weights_in
from tutti.training.losses.class_weights import BALANCED
from tutti.training.points import Points
from tutti.training.prediction import predict, predictions_of
from tutti.training.preflight import warn_if_undefined
from tutti.training.progress import Progress, Several, progress_on
from tutti.training.run_parts import Hooks
from tutti.training.trainer import Trainer
from tutti.training.weights import refuse_unstorable, weights_to_bytes

FLOAT: Final = 4
"""The bytes of an output."""

GONE_S: Final = 10.0
"""The time that a killed process may take to be gone."""

MUCH: Final = 1 << 30
"""The bytes of outputs from which on a metric that needs all of them gets a warning."""


def captured_by(
    config: TrainConfig, objective: Objective, replica: Replica, batches: Batches
) -> GraphedPass | None:
    """Return what computes by a graph; None where the CPU launches each operation.

    Raises:
        BadOption: a graph is asked for where none can be.
    """
    wanted, on_gpu = config.cuda_graph, batches.part.device.type == "cuda"
    if wanted == "on" and (not on_gpu or isinstance(batches, Queue)):
        raise BadOption(NEEDS_GPU_SAMPLES)
    if not on_gpu or isinstance(batches, Queue) or wanted == "off" or batches.augment is not None:
        return None
    if config.precision == "fp16":
        return None
    if objective.loss.weighed:
        if wanted == "on":
            raise BadOption(
                f"loss '{objective.loss.name}' has a denominator of its own, which the CPU must know in each "
                "step; use --cuda-graph off"
            )
        return None
    if isinstance(batches.part.stored_inputs, Columns) or objective.loss.whole:
        if wanted == "on":
            raise BadOption(
                "a graph computes one output of one input; use --cuda-graph off for several inputs, for "
                "sequences, and for losses that get all outputs"
            )
        return None
    if wanted == "auto" and not can_be_recorded(replica.module, objective.loss):
        return None
    return GraphedPass(replica, batches, objective, CudaRecorder())


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a run: what it shares with others, where it is one of many.

    Attributes:
        follower: is told how the run goes, on each rank.
        open_data: opens the data of the configuration (collective).
        ends: says after each epoch whether the run is to end with it, and why (collective over the workers).
        successor: a path that is there once others have taken the run over; None: nobody does.
        alone: it is the only one. Else whoever has many sees to it that cores and memory are sampled, and
            files flushed to the disk (`finish_together`), and takes care of the folders of failed runs.
        on_step: called before each step of this rank, with the number of updates made before.
        prepare: for ranks that prepare themselves while others may still train: called with the data when
            all that needs no state is prepared, returns when they are needed, with the job as it is by then.
    """

    follower: Progress = field(default_factory=Progress)
    open_data: Callable[[TrainJob, Communicator], DataSet] = open_config_data
    ends: Callable[[Communicator], str | None] | None = None
    successor: Path | None = None
    alone: bool = True
    on_step: Callable[[int], None] | None = None
    prepare: Callable[[TrainJob, DataSet], TrainJob] | None = None


def work(
    comm: Communicator, payload: bytes, until_needed_on_hosts: Callable[[], bytes] | None = None
) -> RunOutcome:
    """Train, or serve those who train; every rank calls this (entry point of the ranks).

    Args:
        comm: all ranks of the job, servers included.
        payload: a pickled `TrainJob`.
        until_needed_on_hosts: of ranks in reserve on several hosts: waits until they are needed, and returns
            their job as it is by then.

    Raises:
        UserError: the input is wrong.
    """
    job = load_job(payload, TrainJob)
    around = Surroundings()
    if job.memory is not None and isinstance(comm, HostCommunicator):
        kept = KeptData(job.memory.data)
        around = replace(around, open_data=kept.open)
        if job.gate is not None:
            prepare = partial(until_needed, kept, comm, payload)
            around = replace(around, open_data=partial(open_beside_others, kept), prepare=prepare)
    if until_needed_on_hosts is not None:
        around = replace(around, prepare=lambda *_: load_job(until_needed_on_hosts(), TrainJob))
    # Nobody watches a process that tutti has not started, itself or by mpirun.
    watched = started_by().launcher is Launcher.TUTTI or JOB in os.environ
    if isinstance(comm, BlockingCommunicator) and watched:
        if job.hang_timeout_s is not None:
            print_stacks_when_asked()
        around = replace(around, follower=Pulse(comm), on_step=comm.peers.beat)
    return train(comm, job, around)


def train(comm: Communicator, job: TrainJob, around: Surroundings) -> RunOutcome:
    """Train, or serve those who train (collective).

    Args:
        comm: all ranks of the job, servers included.
        job: the run.
        around: what it shares with others.

    Raises:
        UserError: the input is wrong.
    """
    config, checkpoint = job.config, None
    if around.prepare is None:
        if job.write and job.resume is None and comm.rank == 0 and around.alone:
            check_writable(config.out)
        checkpoint = _checkpoint(comm, job)
    with seeded(config.seed), default_floats(job.floats):
        strategy = check_strategy(job, comm.size, comm.hosts)
        recording = Recording(comm, job)
        team = take_sides(recording.comm, config)
        # All ranks, the workers first, with the numbers that they have among the workers.
        crew = team if team.servers is None else team.servers.comm
        with ExitStack() as stack:
            sampler = stack.enter_context(sampling(crew, job.write and around.alone))
            dataset = around.open_data(job, comm)
            _note_data(job, comm, dataset)
            task = prepare_task(job, dataset)
            if around.prepare is not None:
                job = around.prepare(job, dataset)
                checkpoint = _checkpoint(comm, job)
            elif not job.takes_over:
                warn_if_shown(task.module, comm)
            check_predictions(config, task.dataset)
            if config.weights is not None and checkpoint is None:
                load_from(Path(config.weights), task.module, comm)
            outcome = work_or_serve(
                job,
                team,
                task.module,
                strategy,
                lambda: _train(job, team, task, strategy, around, sampler, recording, checkpoint),
            )
        said = recording.save(outcome.folder if outcome is not None else None)
        if said and not job.quiet:
            print(*said, sep="\n", flush=True)
        return result_for_all(recording.comm, team, outcome)


def _checkpoint(comm: Communicator, job: TrainJob) -> Checkpoint | None:
    """Return the state to go on from: of the memory, else of a folder; None: the run begins."""
    found = None if job.memory is None else kept_in(comm, job.memory)
    return found_by(comm, job.resume) if found is None and job.resume is not None else found


def _why_taken_over(job: TrainJob, comm: Communicator) -> str:
    """Return on rank 0, whose host has the memory, why its ranks have come after others; else nothing."""
    memory = job.memory if job.takes_over and comm.rank == 0 else None
    return "" if memory is None else memory.takeover or ""


def _train(
    job: TrainJob,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    around: Surroundings,
    sampler: Sampler | None,
    recording: Recording,
    checkpoint: Checkpoint | None,
) -> RunOutcome:
    """Train on all ranks of `comm`, each of which holds the whole model or a portion of it."""
    with laid_out(job, comm, task, strategy, checkpoint) as (parts, saved):
        callbacks = callbacks_of(job, comm, parts.task.module)
        told: list[Callable[[], str | None]] = [] if around.ends is None else [partial(around.ends, comm)]
        told += [] if callbacks is None else [callbacks.why_end]
        parts = replace(parts, ending=replace(parts.ending, told=tuple(told)))
        graph = captured_by(parts.config, task.objective, parts.workers.replica, parts.schedule.batches)
        if graph is not None:
            parts = replace(parts, workers=replace(parts.workers, compute=graph))
        reseed(job.config.seed, 1 + parts.portion.peers.rank)
        warn_if_short(strategy, parts.schedule.updates, comm)
        warn_if_much(task, comm)
        warn_if_undefined(task.objective, task.dataset, comm)
        recording.profile(parts.schedule.updates)
        refuse_over(comm, job)  # before anything in the folder of an earlier run is changed
        start = RunStart(
            now(),
            World(comm.size, comm.hosts, torch.get_num_threads()),
            batch_size=parts.config.batch_size,
            lr=parts.config.lr,
            why=_why_taken_over(job, comm),
        )
        if checkpoint is not None and saved is not None:
            refuse_shorter(checkpoint, saved, parts.schedule)
            start = replace(start, step=checkpoint.step, anew=tuple(anew(saved, parts.workers.worker)))
            if comm.rank == 0 and not job.quiet:
                # Why, whoever has started these ranks has said.
                print(resumed_text(replace(start, why="")), flush=True)
        return _run(job, comm, parts, strategy, around, sampler, recording, saved, start, callbacks)


def _note_data(job: TrainJob, comm: Communicator, dataset: DataSet) -> None:
    """Have the process that starts the ranks of hosts know how much memory the data take (on rank 0)."""
    streamed = any(isinstance(part, StreamedPart) for part in dataset.parts)
    if comm.rank == 0 and job.memory is not None and not streamed:
        job.memory.note_data(dataset.nbytes)


def warn_if_short(strategy: Strategy, steps: int, comm: Communicator) -> None:
    """Warn of a run that ends before the workers have exchanged much.

    Args:
        strategy: how they train.
        steps: how many each of them makes.
        comm: the workers.
    """
    if comm.rank == 0 and comm.size > 1 and 1 < strategy.period >= steps:
        print(
            f"tutti: warning: each worker makes {steps} steps, and with strategy '{strategy.name}' they "
            f"exchange something after every {strategy.period}, so they learn next to nothing from each "
            "other; train longer, or have them exchange more often",
            file=sys.stderr,
            flush=True,
        )


def warn_if_shown(module: nn.Module, comm: Communicator) -> None:
    """Warn of plain attributes that lie in the memory of trained weights, which get other memory.

    Args:
        module: the model, before its weights do.
        comm: all ranks.
    """
    if comm.rank > 0:
        return
    weights = memory_of(one for one in module.parameters() if one.requires_grad)
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            # Old torch's spectral_norm computes it anew in each pass.
            anew = f"{attribute}_orig" in owner._parameters
            if isinstance(value, Tensor) and not anew and weights.around(value):
                path = f"{name}.{attribute}" if name else attribute
                print(
                    f"tutti: warning: the attribute '{path}' of the model shows a weight, and will go on "
                    "showing what that was before training; take it from the weight in forward()",
                    file=sys.stderr,
                    flush=True,
                )


def warn_if_much(task: Task, comm: Communicator) -> None:
    """Warn of metrics that need more outputs at once than may be expected to fit into memory.

    Args:
        task: what is learned.
        comm: the workers.
    """
    names = [metric.name for metric in task.objective.metrics if metric.gathers]
    largest = max(task.dataset.parts, key=len)
    nbytes = len(largest) * (outputs_for(task.dataset) * FLOAT + largest.targets[:1].nbytes)
    if comm.rank == 0 and names and nbytes > MUCH:
        print(
            f"tutti: warning: for {', '.join(names)} all outputs of a part are brought together, which takes "
            f"about {nbytes / 1e9:.1f} GB on rank 0 after every epoch; accuracy, f1 or calibration_error are "
            "counted as the samples come",
            file=sys.stderr,
            flush=True,
        )


def _run(
    job: TrainJob,
    comm: Communicator,
    parts: Assembly,
    strategy: Strategy,
    around: Surroundings,
    sampler: Sampler | None,
    recording: Recording,
    saved: Saved | None,
    start: RunStart,
    callbacks: Callbacks | None,
) -> RunOutcome:
    """Train, evaluate, write and print."""
    speaks, task, data = comm.rank == 0 and not job.quiet, parts.task, parts.task.dataset
    facts = strategy.facts(job.config.batch_size, len(data.train))
    if job.write:
        refuse_unstorable(task.module)
    if speaks and not job.takes_over:
        _print_beginning(parts)
    # mpirun gives its ranks a terminal even where what they print goes into a file.
    bar = not started_by().given
    shown = Progress() if job.quiet else progress_on(sys.stdout, comm.rank, bar, notebook=job.notebook)
    # Whoever repeats the run writes another folder.
    config = replace(parts.config, out=None)
    state: dict[str, Any] = {}
    with (
        _run_folder(job, comm, config, task, facts, around, sampler, recording, start) as folder,
        saving(job, comm, parts, folder) as saver,
        # On the rank that has the run folder.
        Logbook(loggers_of(folder, logger_names(config.log)) if folder else {}, config.as_json()) as book,
        # The others wait for rank 0 here, not in their first step: loggers take seconds to begin.
        observed(comm, folder, sampler, wanted=job.write) as heart,
    ):
        path = None if folder is None else str(folder.path)

        def keep() -> None:
            state.update(parts.portion.state())
            if folder is not None:
                folder.write_weights(weights_to_bytes(state))

        points = Progress() if folder is None else Points(folder)
        progress = Several(shown, heart, points, around.follower)
        save = None if saver is None else saver.save
        hooks = Hooks(
            progress,
            book.epoch,
            _both(recording.profiler, around.on_step),
            keep,
            save,
            recording.trace,
            callbacks,
        )
        earlier = [] if saved is None else history_of(saved)
        if job.resume is not None:
            book.go_on(earlier)
        if earlier and around.ends is not None:
            # The run may have been told to end with this epoch, and then killed.
            around.follower.epoch(earlier[-1])
        trainer = parts.trainer(hooks, None if saver is None else saver.agenda(strategy))
        with stoppable(goes_on=job.memory is not None) if job.write else nullcontext():
            history = trainer.fit(saved)
            comm.barrier()
        if trainer.stopped is not None:
            if folder is not None:
                folder.release_weights()
            assert saver is not None, "nothing else stops a run"
            if saver.lost:
                raise StateLost(
                    "the run has stopped, but its state could not be saved, as the warning above says; mend "
                    f"that, then 'tutti train --resume {saver.folder}' goes on from the checkpoint before, "
                    "if there is one"
                )
            book.stop()
            if speaks:
                way = way_on(path, job.objects)
                print(summary_lines.stopped(trainer.stopped, saver.step, way), flush=True)
            outcome = RunOutcome(config, history, None, facts, path, data.shape, outputs_for(data), None)
            return replace(outcome, stopped=trainer.stopped)
        heart.doing(TESTING)
        summary = _judge(parts, trainer, history, start.world)
        if config.predictions and data.validation is not None:
            outputs = predict(task.module, data.validation, parts.workers.comm, task.objective.arithmetic)
            if folder is not None and outputs is not None:
                found = predictions_of(data.validation, outputs, task.objective.loss.ignored)
                folder.write_predictions(found.as_bytes())
        pipeline = parts.portion.record()
        if folder is not None:
            if pipeline is not None:
                folder.write(pipeline)
            summary = replace(summary, ranks_in_turn=ranks_in_turn(folder.starts().records))
            folder.write(summary)
            book.finish(summary)
    weights = in_own_memory(state) if job.bring_weights else None
    noted = () if callbacks is None or not job.bring_weights else tuple(callbacks.attributes())
    outcome = RunOutcome(
        config, history, summary, facts, path, data.shape, outputs_for(data), weights, None, noted
    )
    if job.bring_weights and isinstance(parts.portion, Whole):
        outcome = replace(outcome, attributes=in_own_memory(trainer.noted()))
    if speaks:
        _print_end(outcome, summary, data, pipeline)
    return outcome


def _judge(parts: Assembly, trainer: Trainer, history: list[EpochRecord], world: World) -> Summary:
    """Evaluate the model that a run has ended with (collective)."""
    task, ranking = parts.task, parts.ending.ranking
    best = trainer.restored or ranking.best(history)
    test = task.evaluate(task.dataset.test, parts.workers.comm)
    return replace(
        Summary.of(history, test, task.parameters, world),
        validation=trainer.final,
        ended_early=trainer.ended,
        best_epoch=None if best is None else best.epoch,
        best_by=str(ranking.quantity),
        restored=trainer.restored is not None,
    )


class Pulse(Progress):
    """The sign that a rank does something else than to train, which may take any time.

    Args:
        comm: all ranks of the job.
    """

    def __init__(self, comm: BlockingCommunicator) -> None:
        self._peers = comm.peers

    def doing(self, what: str) -> None:
        """The rank does something else."""
        self._peers.beat(None)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended; callbacks are to be told."""
        self._peers.beat(None)

    def end(self) -> None:
        """Training has ended."""
        self._peers.beat(None)


def _both(
    one: Callable[[int], None] | None, other: Callable[[int], None] | None
) -> Callable[[int], None] | None:
    """Return what calls both functions, of which there may be fewer."""
    if one is None or other is None:
        return one or other
    first, second = one, other

    def call(made: int) -> None:
        first(made)
        second(made)

    return call


@contextmanager
def _run_folder(
    job: TrainJob,
    comm: Communicator,
    config: TrainConfig,
    task: Task,
    facts: StrategyFacts,
    around: Surroundings,
    sampler: Sampler | None,
    recording: Recording,
    start: RunStart,
) -> Iterator[RunFolder | None]:
    """The run folder, with what is known before training in it; None on the ranks that write none.

    If the run fails the folder stays, unless that is in the first epoch: its name is free again then. Whoever
    has started the ranks sees to that, if it can: this one may be ended before it comes to it.
    """
    if comm.rank or not job.write:
        yield None
        return
    data = task.dataset
    if job.resume is not None:
        folder = RunFolder(job.resume.folder)
    elif around.alone:
        folder = RunFolder.create(job.config.out, task.name, data.name, task.nbytes)
    else:
        folder = RunFolder.take(cast("str", job.config.out))
    if job.memory is not None:
        # At once: ranks that come after these must know it as theirs, whenever these are lost.
        job.memory.note_folder(folder.path.absolute())
    # Ranks that were lost may not be gone yet, though they write no more.
    with FolderLock(folder.path, GONE_S if job.takes_over else 0.0) as lock:
        folder = replace(folder, lock=lock, together=not around.alone, successor=around.successor)
        if lock.problem is not None:
            print(
                f"tutti: warning: the file system of {folder.path} has no locks ({lock.problem}); see to it "
                "that no other job is given this folder",
                file=sys.stderr,
                flush=True,
            )
        if job.resume is not None:
            folder.begin_again()
        told = not around.alone or (job.starter is not None and job.starter.send(folder.path.absolute()))
        if not told and comm.size > 1:
            take_back_after_me(folder)
        try:
            folder.reserve_weights(task.nbytes)
            folder.write_config(config.as_json(), seal(config.as_json()))
            of_classes = weights_in(task.objective.loss) if config.class_weights == BALANCED else None
            folder.write(trained_on(data, of_classes))
            folder.write(facts)
            folder.note_start(start, flush=not job.takes_over)
            yield folder
        except Exception:
            if folder.begun or not around.alone:
                folder.release_weights()
                recording.rescue(folder)
            elif not told:
                if sampler is not None:
                    sampler.abandon()
                folder.remove()
            raise


def _print_beginning(parts: Assembly) -> None:
    task, train = parts.task, parts.task.dataset.train
    together = not parts.schedule.batches.own
    print(task.described(), summary_lines.training(parts.config, together), sep="\n", flush=True)
    if isinstance(train, StreamedPart):
        print(*_of_stream(train, parts.config), sep="\n", flush=True)


def _of_stream(part: StreamedPart, config: TrainConfig) -> Iterator[str]:
    """Describe how a part is streamed, and how good its shuffle is."""
    stored, windows = part.stored_inputs, part.windows
    assert isinstance(stored, torch.Tensor), "what is streamed has one input"
    assert windows is not None, "the training part is streamed in windows"
    each = stored[:1].nbytes
    yield (
        f"streaming {stored.nbytes / 1e9:.2f} GB: blocks of {windows.block:,} samples, windows of "
        f"{windows.largest * each / 1e6:.1f} MB, of which one is in use and the next is read meanwhile"
    )
    yield str(quality_of(windows, part.targets, config.batch_size, config.seed))


def _print_end(
    outcome: RunOutcome, summary: Summary, dataset: DataSet, pipeline: PipelineRecord | None
) -> None:
    history, validate = outcome.history, outcome.config.validate
    print(*summary_lines.result(summary, dataset.labels), sep="\n")
    if isinstance(dataset.train, StreamedPart):
        print(summary_lines.loading(history))
    for line in summary_lines.exchanges(history):
        print(line)
    if pipeline is not None:
        print(summary_lines.bubble(pipeline))
    if validate != "pause" and dataset.validation is not None:
        print(summary_lines.validation(validate, history))
    if outcome.folder is not None:
        print(f"run folder: {outcome.folder}")
    sys.stdout.flush()
