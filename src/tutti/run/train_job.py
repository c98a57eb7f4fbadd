"""The jobs of training, evaluation and prediction, and their outcomes. Needs no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from typing_extensions import override

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadOption, PeerLost
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import Placement, is_this_machine
from tutti.records import checkpoints
from tutti.records.files import unfinished_file
from tutti.records.folder_lock import refuse_locked
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import RunFolder, StrategyFacts, check_writable
from tutti.records.shapes import Shape
from tutti.run.config import TrainConfig, flag
from tutti.run.jobs import Job
from tutti.run.resume import Resume, way_on
from tutti.terminal import say_on_stderr
from tutti.training.intervals import OFF, seconds_of
from tutti.training.loggers import logger_names


@dataclass(frozen=True)
class Beginning:
    """The moment at which a run was started.

    The clock of the day may be set while the run goes on. So the time since the boot counts, in which a
    machine may also have slept; elsewhere than on that machine, as with --hosts, the clock of the day does.

    Attributes:
        day_s: seconds since the epoch.
        boot_s: seconds since the boot.
        boot: which boot that was, and of which container if it has a clock of its own; None: nobody knows.
    """

    day_s: float
    boot_s: float
    boot: tuple[str, str] | None

    @classmethod
    def now(cls) -> Beginning:
        """Return the moment of the call."""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot())

    def passed_s(self) -> float:
        """The seconds that have passed since then."""
        now = Beginning.now()
        return (
            now.day_s - self.day_s if now.boot is None or now.boot != self.boot else now.boot_s - self.boot_s
        )


def _boot() -> tuple[str, str] | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/time")
    except OSError:
        return None


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps that torch's profiler records.

    Attributes:
        first: the first step, counted from 1.
        last: the last one.
        ranks: on which ranks.
    """

    first: int
    last: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class TrainJob(Job):
    """A training run.

    Attributes:
        write: write a run folder.
        bring_weights: return the weights to the caller.
        trace: write what every rank did when into the run folder.
        profile: the steps that torch's profiler records; None: none.
        resume: the run to go on with; None: a new one.
        began: when it was started: its time limit counts from there.
        floats: torch's default type of floats in the caller's program, such as "float64"; None: that of the
            ranks.
        notebook: a notebook's cell shows what the ranks print.
        starter: a file of the process that starts the ranks, into which rank 0 writes the run folder; None: a
            launcher that knows nothing of run folders.
        memory: where the state is copied to, so that new ranks can go on when one is lost; None: nowhere.
    """

    entry: ClassVar[str] = "tutti.run.train:work"
    trains: ClassVar[bool] = True

    write: bool = True
    bring_weights: bool = False
    trace: bool = False
    profile: ProfiledSteps | None = None
    resume: Resume | None = None
    began: Beginning = field(default_factory=Beginning.now)
    floats: str | None = None
    notebook: bool = False
    starter: FileAddress | None = None
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
        if logger_names(self.config.log) and not self.write:
            raise BadOption(f"log={self.config.log!r} is for a run with a folder; name one with out=...")
        for option, asked in (("--trace", self.trace), ("--profile", self.profile is not None)):
            if asked and not self.write:
                raise BadOption(
                    f"{option} writes into the run folder, but there is none; name one with out=..."
                )
        if self.config.predictions and not self.write:
            raise BadOption(
                "--predictions writes into the run folder, but there is none; name one with out=..."
            )
        for name in ("time_limit", "checkpoint"):
            if getattr(self.config, name) != getattr(TrainConfig, name) and not self.write:
                raise BadOption(
                    f"{flag(name)} is for a run whose state is saved in its folder, but there is none; name "
                    "one with out=..."
                )
        if self.config.on_failure != "stop":
            _refuse_elsewhere(self.config, placement)
        launcher = started_by().launcher
        if launcher is not Launcher.ALONE and self.config.hang_timeout not in (TrainConfig.hang_timeout, OFF):
            raise BadOption(
                f"--hang-timeout {self.config.hang_timeout} is for ranks that tutti starts, and nobody "
                f"would watch those that {launcher.value} starts; give --hang-timeout {OFF}, or leave "
                f"{launcher.value} out and name the hosts by --hosts"
            )
        most = self.config.max_failures
        if most != TrainConfig.max_failures and self.config.on_failure == "stop":
            raise BadOption(
                "--max-failures says how many losses --on-failure respawn or shrink survives; give one of "
                f"these, or leave --max-failures {most} out"
            )
        ranks = placement.ranks
        missing = [rank for rank in self.profile.ranks if rank >= ranks] if self.profile is not None else []
        if missing:
            raise BadOption(
                f"--profile-ranks names rank {missing[0]}, but the job has {ranks} "
                f"rank{'' if ranks == 1 else 's'}, counted from 0"
            )
        if launcher is Launcher.ALONE and not placement.hosts:
            if self.resume is None:
                check_writable(self.config.out if self.write else None)
            else:
                refuse_locked(self.resume.folder)

    @override
    @contextmanager
    def started(self) -> Iterator[Job]:
        """Say how to go on when a rank is lost."""
        if not self.write or started_by().launcher is not Launcher.ALONE:
            yield self
            return
        with open(memfd.make("folder"), "r+b") as file:
            try:
                yield replace(self, starter=FileAddress.of(file.fileno()))
            except PeerLost:
                if folder := file.read():
                    self._say_how_to_go_on(Path(os.fsdecode(folder)))
                raise

    def note_folder(self, folder: Path) -> None:
        """Have the process that starts the ranks know the run folder, if it is on this host."""
        if self.starter is not None:
            with suppress(OSError, ValueError), open(self.starter.open(), "wb") as file:
                file.write(os.fsencode(folder))

    def _say_how_to_go_on(self, folder: Path) -> None:
        """Name the checkpoint of the run in `folder`, which has lost a rank, and what goes on from it."""
        present = checkpoints.present(folder / checkpoints.FOLDER)
        if RunFolder(folder).finished:
            said = f"the run had finished before: its weights and its summary are in {folder}"
        elif present:
            hosts = ""
            if self.config.hosts is not None:
                hosts = " and hosts='...'" if self.objects else " --hosts ..."
                hosts += " with those that are left"
            way = f"go on from there by: {way_on(folder, self.objects, self.config)}{hosts}"
            said = f"the run's newest checkpoint is {present[-1].name}; {way}"
        else:
            sooner = "checkpoint='1m'" if self.objects else "--checkpoint 1m"
            said = f"the run had no checkpoint yet; next time take one sooner, by {sooner}"
        say_on_stderr(said)


def _refuse_elsewhere(config: TrainConfig, placement: Placement) -> None:
    """Refuse to go on without a lost rank where another program ends the others, or none can take over.

    Raises:
        BadOption: this is such a place.
    """
    launcher, where = started_by().launcher, None
    if launcher is not Launcher.ALONE:
        where = f"ranks that {launcher.value} starts"
    elif placement.hosts and not is_this_machine(placement.hosts[0].name):
        raise BadOption(
            f"with --on-failure {config.on_failure} the first of --hosts has to be this machine, where the "
            f"state is kept, and it is {placement.hosts[0].name}; name this machine first, or leave "
            "--on-failure out and start the run again with --resume auto, which goes on from its newest "
            "checkpoint"
        )
    elif config.device != "cpu":
        where = f"--device {config.device}"
    if where is not None:
        raise BadOption(
            f"--on-failure {config.on_failure} is for ranks that tutti starts itself, on CPUs, not for "
            f"{where}; leave it out, and start the run again with --resume auto, which goes on from its "
            "newest checkpoint"
        )


@dataclass(frozen=True)
class RunOutcome:
    """The result of a training run, as it comes back to the process that started it.

    Attributes:
        config: the resolved configuration.
        history: one record for each epoch.
        summary: the totals, and the evaluation on the test part; None: the run has stopped before its end.
        stopped: why it has, to go on another time.
        strategy: the facts of its strategy that advice depends on.
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
    strategy: StrategyFacts
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

    @override
    @contextmanager
    def started(self) -> Iterator[Job]:
        """Remove what a rank has written that was ended before it could do so itself."""
        try:
            yield self
        except BaseException:
            with suppress(OSError):
                unfinished_file(Path(self.out)).unlink(missing_ok=True)
            raise


PARTS: Final = ("train", "validation", "test")
"""The parts of a data set."""


def again(job: TrainJob) -> TrainJob:
    """Return the job of ranks that come after others of the same run: they go on in its folder."""
    folder = None if job.memory is None else job.memory.folder
    if job.resume is not None or folder is None:
        return job
    return replace(job, resume=Resume(folder, auto=True, again=True))
