"""A run that is assembled: it trains, evaluates, writes its folder and prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from tutti.comm.base import Communicator
from tutti.comm.blocking import BlockingCommunicator
from tutti.data import DataSet
from tutti.data.streaming import StreamedPart
from tutti.errors import StateLost
from tutti.launch.launcher import started_by
from tutti.launch.stop_request import stoppable
from tutti.launch.usage_sampler import Sampler
from tutti.records.folder_lock import FolderLock
from tutti.records.heartbeat import TESTING
from tutti.records.pipeline import PipelineRecord
from tutti.records.run import EpochRecord, RunStart, Summary, ranks_in_turn
from tutti.records.run_folder import RunFolder, StrategyFacts
from tutti.run import summary_lines
from tutti.run.build import Assembly, open_config_data, outputs_for, trained_on
from tutti.run.config import TrainConfig
from tutti.run.recording import Recording, observed
from tutti.run.restore import history_of
from tutti.run.resume import way_on
from tutti.run.saving import Saving, saving
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.state import in_own_memory
from tutti.terminal import warn_on_stderr
from tutti.training.evaluation import named_buffers
from tutti.training.loggers import logger_names, loggers_of
from tutti.training.loggers.base import Logbook
from tutti.training.losses import weights_in
from tutti.training.losses.weights import BALANCED
from tutti.training.prediction import predict, predictions_of
from tutti.training.progress import Points, Progress, Several, progress_on
from tutti.training.run_parts import Hooks
from tutti.training.trainer import Trainer
from tutti.training.weights import refuse_unstorable, weights_to_bytes

GONE_S: Final = 10.0
"""The time that a killed process may take to be gone."""


@dataclass(frozen=True)
class RunContext:
    """The context of a run: what it shares with others, where it is one of many.

    Attributes:
        follower: is told how the run goes, on each rank.
        open_data: opens the data of the configuration (collective).
        ends: says after each epoch whether the run is to end with it, and why (collective over the workers).
        alone: it is the only one. Else whoever has many sees to it that cores and memory are sampled, and
            files flushed to the disk (`finish_together`), and takes care of the folders of failed runs.
        on_step: called before each step of this rank, with the number of updates made before.
    """

    follower: Progress = field(default_factory=Progress)
    open_data: Callable[[TrainJob, Communicator], DataSet] = open_config_data
    ends: Callable[[Communicator], str | None] | None = None
    alone: bool = True
    on_step: Callable[[int], None] | None = None


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


@dataclass(frozen=True)
class AssembledRun:
    """A run with all its parts, on one rank of those that train.

    Attributes:
        job: what is asked for.
        comm: the ranks that train.
        parts: the model, the workers, the schedule and the rules by which it ends.
        context: what the run shares with others.
        sampler: samples what cores and memory are used for; None: nobody does.
        recording: traces.
        start: where and how it begins, or goes on.
    """

    job: TrainJob
    comm: Communicator
    parts: Assembly
    context: RunContext
    sampler: Sampler | None
    recording: Recording
    start: RunStart

    def execute(self) -> RunOutcome:
        """Train, evaluate, write and print (collective)."""
        job, comm, data = self.job, self.comm, self.parts.task.dataset
        if job.write:
            refuse_unstorable(self.parts.task.module)
        if self._speaks and not job.takeover:
            _print_beginning(self.parts)
        names, weights = logger_names(job.config.log), dict[str, Any]()
        with (
            _run_folder(self) as folder,
            saving(job, comm, self.parts, folder) as saver,
            # On the rank that has the run folder.
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
                self._facts,
                None if folder is None else str(folder.path),
                data.shape,
                outputs_for(data),
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
                summary = replace(summary, ranks_in_turn=ranks_in_turn(folder.starts().records))
                folder.write(summary)
                book.finish(summary)
        outcome = replace(outcome, summary=summary)
        if self._speaks:
            _print_end(outcome, summary, data, pipeline)
        return self._with_model(outcome, trainer, weights) if job.bring_weights else outcome

    @property
    def _speaks(self) -> bool:
        return self.comm.rank == 0 and not self.job.quiet

    @property
    def _config(self) -> TrainConfig:
        # Whoever repeats the run writes another folder.
        return replace(self.parts.config, out=None)

    @property
    def _facts(self) -> StrategyFacts:
        return self.parts.strategy.facts(self.job.config.batch_size, len(self.parts.task.dataset.train))

    def _trainer(
        self,
        folder: RunFolder | None,
        saver: Saving | None,
        book: Logbook,
        heartbeat: Progress,
        weights: dict[str, Any],
    ) -> Trainer:
        """Return the trainer, with all that observes it; `weights` gets the trained ones."""

        def keep() -> None:
            weights.update(self.parts.portion.state())
            if folder is not None:
                folder.write_weights(weights_to_bytes(weights))

        # mpirun gives its ranks a terminal even where what they print goes into a file.
        bar, notebook = not started_by().given, self.job.notebook
        shown = (
            Progress() if self.job.quiet else progress_on(sys.stdout, self.comm.rank, bar, notebook=notebook)
        )
        points = Progress() if folder is None else Points(folder)
        hooks = Hooks(
            Several(shown, heartbeat, points, self.context.follower),
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
        if earlier and self.context.ends is not None:
            # The run may have been told to end with this epoch, and then killed.
            self.context.follower.epoch(earlier[-1])
        return self.parts.trainer(hooks, None if saver is None else saver.agenda())

    def _stopped(self, outcome: RunOutcome, why: str, saver: Saving, book: Logbook) -> RunOutcome:
        """Return the outcome of a run that goes on later."""
        if saver.lost:
            raise StateLost(
                "the run has stopped, but its state could not be saved, as the warning above says; mend "
                "that, and resume the run: it goes on from the checkpoint before"
            )
        book.stop()
        if self._speaks:
            way = way_on(outcome.folder, self.job.objects, self.job.config)
            print(summary_lines.stopped(why, saver.step, way), flush=True)
        return replace(outcome, stopped=why)

    def _judge(self, trainer: Trainer, history: list[EpochRecord]) -> Summary:
        """Evaluate the model that the run has ended with (collective)."""
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
        """Write predictions of the validation part, if they are asked for (collective)."""
        task, part = self.parts.task, self.parts.task.dataset.validation
        if not self._config.predictions or part is None:
            return
        outputs = predict(task.module, part, self.parts.workers.comm, task.objective.arithmetic)
        if folder is not None and outputs is not None:
            found = predictions_of(part, outputs, task.objective.loss.ignored)
            folder.write_predictions(found.as_bytes())

    def _with_model(self, outcome: RunOutcome, trainer: Trainer, weights: dict[str, Any]) -> RunOutcome:
        """Return the outcome with the model, for a caller in Python."""
        callbacks, buffers = self.parts.callbacks, named_buffers(trainer.replica.module)
        return replace(
            outcome,
            weights=in_own_memory(weights),
            buffers=in_own_memory({name: one for name, one in buffers.items() if name not in weights}),
            callbacks=() if callbacks is None else tuple(callbacks.attributes()),
        )


@contextmanager
def _run_folder(run: AssembledRun) -> Iterator[RunFolder | None]:
    """The run folder, with what is known before training in it; None on the ranks that write none."""
    job, context, task, config = run.job, run.context, run.parts.task, run._config
    if run.comm.rank or not job.write:
        yield None
        return
    if job.resume is not None:
        folder = RunFolder(job.resume.folder)
    elif context.alone:
        folder = RunFolder.create(job.config.out, task.name, task.dataset.name, task.nbytes)
    else:
        folder = RunFolder.take(cast("str", job.config.out))
    if job.memory is not None:
        # At once: ranks that come after these must know it as theirs, whenever these are lost.
        job.memory.note_folder(folder.path.absolute())
    # Ranks that were lost may not be gone yet, though they write no more.
    with FolderLock(folder.path, GONE_S if job.takeover else 0.0) as lock:
        folder = replace(folder, lock=lock, together=not context.alone)
        if lock.problem is not None:
            warn_on_stderr(
                f"the file system of {folder.path} has no locks ({lock.problem}); see to it that no other "
                "job is given this folder"
            )
        if job.resume is not None:
            folder.begin_again()
        if run._speaks and not job.takeover:
            print(f"run folder: {folder.path}", flush=True)  # A run that loses a rank goes on from there.
        try:
            folder.write_config(config.as_json())
            of_classes = weights_in(task.objective.loss) if config.class_weights == BALANCED else None
            folder.write(trained_on(task.dataset, of_classes))
            folder.write(run._facts)
            folder.note_start(run.start, flush=not job.takeover)
            yield folder
        except Exception:
            run.recording.rescue(folder)
            raise


def _print_beginning(parts: Assembly) -> None:
    task, train = parts.task, parts.task.dataset.train
    together = not parts.schedule.batches.own
    print(task.described(), summary_lines.training(parts.config, together), sep="\n", flush=True)
    if isinstance(train, StreamedPart):
        each, windows = train.sample_bytes, train.windows
        blocks = -(-windows.samples // windows.block)
        print(
            f"streaming {len(train) * each / 1e9:.2f} GB: blocks of {windows.block:,} samples, windows of "
            f"{windows.window * each / 1e6:.1f} MB, of which one is in use and the next is read meanwhile\n"
            f"shuffle: a batch draws from {min(-(-windows.window // windows.block), blocks):,} of {blocks:,} "
            f"blocks ({windows.window / windows.samples:.2%} of the samples)",
            flush=True,
        )


def _print_end(
    outcome: RunOutcome, summary: Summary, dataset: DataSet, pipeline: PipelineRecord | None
) -> None:
    history, validate = outcome.history, outcome.config.validate
    lines = summary_lines.result(summary, dataset.labels)
    if isinstance(dataset.train, StreamedPart):
        lines.append(summary_lines.loading(history))
    lines += summary_lines.exchanges(history)
    if pipeline is not None:
        lines.append(summary_lines.bubble(pipeline))
    if validate != "pause" and dataset.validation is not None:
        lines.append(summary_lines.validation(validate, history))
    if outcome.folder is not None:
        lines.append(f"run folder: {outcome.folder}")
    print(*lines, sep="\n", flush=True)
