"""The jobs of training, evaluation and prediction, and their outcomes. Needs no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from typing_extensions import override

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadOption
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement, is_this_machine
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.run import summary_lines
from tutti.run.config import STOP, TrainConfig, flag
from tutti.run.jobs import Job
from tutti.run.resume import Resume
from tutti.training.intervals import OFF, seconds_of


@dataclass(frozen=True)
class TrainJob(Job):
    """A training run."""

    entry: ClassVar[str] = "tutti.run.train:work"

    write: bool = True  # a run folder
    bring_weights: bool = False  # to the caller
    trace: bool = False  # write what every rank did when into the run folder
    resume: Resume | None = None  # the run to continue; None: a new one
    began: float = field(default_factory=time.time)  # in seconds since the epoch
    bar: bool = False  # shown on a terminal, although the run is quiet
    notebook: bool = False  # a cell shows what the ranks print
    memory: MemoryPlace | None = None  # where the state is copied to, for the ranks after a loss
    data: FileAddress | None = None  # of an arena with the data set, if earlier ranks have read it
    takeover: str = ""  # why these ranks replace others

    @property
    def hang_timeout_s(self) -> float | None:
        """The seconds after which a rank without a step is lost; None: never."""
        text = self.config.hang_timeout
        return None if text == OFF else seconds_of(text, "--hang-timeout")

    @property
    def deadline(self) -> float | None:
        """The time at which the run must stop, in seconds since the epoch."""
        text = self.config.time_limit
        return None if text is None else self.began + seconds_of(text, "--time-limit")

    def again(self, why: str) -> TrainJob:
        """Return the job of ranks that follow others of the same run: they continue in its folder."""
        folder, resume = None if self.memory is None else self.memory.folder, self.resume
        if resume is None and folder is not None:
            resume = Resume(folder, auto=True, again=True)
        return replace(self, resume=resume, takeover=why)

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
        foreign = bool(placement.hosts) and not is_this_machine(placement.hosts[0].name)
        if config.on_failure != STOP and (
            launcher is not Launcher.ALONE or foreign or config.device != "cpu"
        ):
            raise BadOption(
                f"--on-failure {config.on_failure} is for ranks on CPUs that tutti starts itself, with "
                "--hosts from the first of them; leave it out, and start a run that has ended again with "
                "--resume auto"
            )


@dataclass(frozen=True)
class RunOutcome:
    """The result of a training run, for the process that started it."""

    config: TrainConfig  # resolved
    history: list[EpochRecord]
    summary: Summary | None  # None: the run has stopped before its end
    folder: str | None
    data: TrainedOn  # as the model saw them
    weights: dict[str, Any] | None  # the model's state by name, if `bring_weights`
    stopped: str | None = None  # why
    callbacks: tuple[bytes | None, ...] = ()  # pickled attributes of rank 0's copies; None: they cannot be


@dataclass(frozen=True)
class EvaluateJob(Job):
    """An evaluation of a trained model; `config` is its run's, with today's changes."""

    entry: ClassVar[str] = "tutti.run.evaluate:work"

    folder: str
    part: str | None  # one of `PARTS`; None: the test part, or all of other data that have no parts
    weights: str  # where they are: see `tutti.exports.sources.read_from`
    other_data: bool = False  # than the run was trained on; they are scaled as its data were


@dataclass(frozen=True)
class PredictJob(Job):
    """The predictions of a trained model; `config` is its run's, with today's changes."""

    entry: ClassVar[str] = "tutti.run.predict:work"

    place: str  # the run folder, one of its checkpoints, or the folder of an ensemble
    out: str  # the file to write
    part: str | None = None  # as of an evaluation
    other_data: bool = False
    weights: str | None = None  # where others than the run's own are
    trust: bool = False  # the run's configuration may name code
    overwrite: bool = False  # the file, if it is there

    @override
    def check(self, placement: Placement) -> None:
        path = Path(self.out)
        if path.suffix not in SUFFIXES:
            raise BadOption(f"the file is {path}; give one that ends in {', '.join(SUFFIXES)}")
        if path.exists() and not (self.overwrite and path.is_file()):
            raise BadOption(f"{path} is there already; name another file, or give --overwrite")


PARTS: Final = ("train", "validation", "test")
"""The parts of a data set."""

SUFFIXES: Final = (".csv", ".parquet", ".npy")
"""The ends of the names of files of predictions."""


def outcome_again(resume: Resume, config: TrainConfig, quiet: bool = False) -> RunOutcome | None:
    """Print and return the outcome of a finished run; None: there is something to train."""
    folder = RunFolder(resume.folder)
    if resume.checkpoint is not None or not folder.finished:
        return None
    before = TrainConfig.from_json(folder.config())
    lengths = [(one.epochs, one.steps, one.monitor, one.patience, one.goal) for one in (before, config)]
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
        folder=str(folder.path),
        data=data,
        weights=None,
    )
