"""The jobs of training, evaluation and prediction, and their outcomes. Needs no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from typing_extensions import override

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.errors import BadOption
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement, is_this_machine
from tutti.records.run import EpochRecord, RunStart, Summary
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.records.shapes import Shape
from tutti.run import summary_lines
from tutti.run.config import STOP, TrainConfig, flag
from tutti.run.jobs import Job
from tutti.run.resume import Resume
from tutti.training.intervals import OFF, seconds_of


@dataclass(frozen=True)
class TrainJob(Job):
    """A training run.

    Attributes:
        write: write a run folder.
        bring_weights: return the weights to the caller.
        trace: write what every rank did when into the run folder.
        resume: the run to go on with; None: a new one.
        began: when it was started, in seconds since the epoch: its time limit counts from there.
        floats: torch's default type of floats in the caller's program, such as "float64"; None: that of the
            ranks.
        notebook: a notebook's cell shows what the ranks print.
        memory: where the state is copied to, so that new ranks can go on when one is lost; None: nowhere.
    """

    entry: ClassVar[str] = "tutti.run.train:work"

    write: bool = True
    bring_weights: bool = False
    trace: bool = False
    resume: Resume | None = None
    began: float = field(default_factory=time.time)
    floats: str | None = None
    notebook: bool = False
    memory: MemoryPlace | None = None

    @property
    def takeover(self) -> str:
        """Why these ranks come after others of the run, where the memory is, with rank 0; else nothing."""
        return "" if self.memory is None else self.memory.takeover or ""

    @property
    def hang_timeout_s(self) -> float | None:
        """The seconds after which a rank that makes no step is lost; None: it may take any time."""
        text = self.config.hang_timeout
        return None if text == OFF else seconds_of(text, "--hang-timeout")

    @override
    def check(self, placement: Placement) -> None:
        config, launcher = self.config, started_by().launcher
        for name in ("trace", "predictions", "log", "time_limit", "checkpoint"):
            given = self.trace if name == "trace" else getattr(config, name) != getattr(TrainConfig, name)
            if given and not self.write:
                raise BadOption(
                    f"{flag(name)} is for a run with a folder, but there is none; name one with out=..."
                )
        if launcher is not Launcher.ALONE and config.hang_timeout not in (TrainConfig.hang_timeout, OFF):
            raise BadOption(
                f"--hang-timeout {config.hang_timeout} is for ranks that tutti starts, not {launcher.value}; "
                f"give --hang-timeout {OFF}, or name the hosts by --hosts"
            )
        if config.on_failure == STOP:
            return
        where = None
        if launcher is not Launcher.ALONE:
            where = f"ranks that {launcher.value} starts"
        elif placement.hosts and not is_this_machine(placement.hosts[0].name):
            where = f"--hosts whose first one, {placement.hosts[0].name}, is not this machine"
        elif config.device != "cpu":
            where = f"--device {config.device}"
        if where is not None:
            raise BadOption(
                f"--on-failure {config.on_failure} is for ranks that tutti starts itself, on CPUs, from the "
                f"first of --hosts, not for {where}; leave it out, and start a run that has ended again with "
                "--resume auto"
            )


@dataclass(frozen=True)
class RunOutcome:
    """The result of a training run, as it comes back to the process that started it.

    Attributes:
        config: the resolved configuration.
        history: one record for each epoch.
        summary: the totals, and the evaluation on the test part; None: the run has stopped before its end.
        stopped: why it has, to go on another time.
        pace: of its strategy, as in a `RunStart`.
        folder: the run folder, if one was written.
        shape: of one input of the model.
        outputs: of the model.
        weights: the model's state by name, as tensors, if it was asked for.
        buffers: those that its state does not have, by name.
        callbacks: the pickled attributes of the caller's objects, as rank 0's copies have them; None: they
            cannot be pickled.
    """

    config: TrainConfig
    history: list[EpochRecord]
    summary: Summary | None
    pace: str
    folder: str | None
    shape: Shape
    outputs: int
    weights: dict[str, Any] | None
    buffers: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    callbacks: tuple[bytes | None, ...] = ()


@dataclass(frozen=True)
class EvaluateJob(Job):
    """An evaluation of a trained model: `config` is that of its run, with what is to be different now.

    Attributes:
        folder: the run folder.
        part: one of `PARTS`; None: the test part, or all of other data that have no parts.
        other_data: the part is of other data than the run was trained on, or was left out of its split; it is
            scaled as that of the run was.
        weights: the place of the weights: see `tutti.exports.sources.read_from`.
        notes: what to say of them, a sentence each.
    """

    entry: ClassVar[str] = "tutti.run.evaluate:work"

    folder: str
    part: str | None
    weights: str
    other_data: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PredictJob(Job):
    """The predictions of a trained model: `config` is that of its run, with what is to be different now.

    Attributes:
        place: the run folder, one of its checkpoints, or the folder of an ensemble.
        out: the file to write.
        part: one of `PARTS`; None: the test part, or all of other data that have no parts.
        other_data: the samples are not those of the run's own data.
        weights: the place of others than the run's own.
        trust: whether the run's configuration may name code.
    """

    entry: ClassVar[str] = "tutti.run.predict:work"

    place: str
    out: str
    part: str | None = None
    other_data: bool = False
    weights: str | None = None
    trust: bool = False


PARTS: Final = ("train", "validation", "test")
"""The parts of a data set."""


def again(job: TrainJob) -> TrainJob:
    """Return the job of ranks that come after others of the same run: they go on in its folder."""
    folder = None if job.memory is None else job.memory.folder
    if job.resume is not None or folder is None:
        return job
    return replace(job, resume=Resume(folder, auto=True, again=True))


def outcome_again(resume: Resume, config: TrainConfig, quiet: bool = False) -> RunOutcome | None:
    """Return the outcome of a run that was to go on, but has come to its end; say so.

    Returns:
        The outcome, without the weights; None: there is something left to be trained.
    """
    folder = RunFolder(resume.folder)
    if resume.checkpoint is not None or not folder.finished:
        return None
    before = TrainConfig.from_json(folder.config())
    lengths = [(one.epochs, one.steps, one.monitor, one.patience, one.target) for one in (before, config)]
    if lengths[0] != lengths[1]:
        return None
    summary, data = folder.read(Summary), folder.read(TrainedOn)
    if not quiet and started_by().rank == 0:
        print(f"the run in {resume.folder} has come to its end; give more epochs to train on")
        print(*summary_lines.result(summary, data.labels), f"run folder: {folder.path}", sep="\n", flush=True)
    return RunOutcome(
        config=before,
        history=folder.lines(EpochRecord).records,
        summary=summary,
        pace=folder.lines(RunStart).records[-1].pace,
        folder=str(folder.path),
        shape=data.of_inputs,
        outputs=data.classes or data.outputs,
        weights=None,
    )
