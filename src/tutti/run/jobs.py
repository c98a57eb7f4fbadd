"""What is sent to the ranks, and how they are started. Needs no torch: the ranks import it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from tutti.errors import BadOption
from tutti.launch.cores import Cores
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.mpirun_channel import Address, MpirunChannel
from tutti.launch.placement import Placement, make_plan
from tutti.launch.start import start
from tutti.model_parallel.layout import Layout, ranks_of
from tutti.records.run import EpochRecord, Summary
from tutti.run.config import Options, TrainConfig
from tutti.studies.autotune.candidates import Choices
from tutti.training.loggers import logger_names
from tutti.training.run_folder import RunFolder, check_writable

PARTS: Final = ("test", "validation", "train")
"""The parts of a data set."""

DTYPES: Final = {"float32": "fp32", "float64": "fp64"}
"""What a comparison can compute with, and the precision of the configuration that this is."""


@dataclass(frozen=True)
class ProfiledSteps:
    """What torch's profiler is to look at.

    Attributes:
        first: the first step, counted from 1.
        last: the last one.
        ranks: on which ranks.
    """

    first: int
    last: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class TrainJob:
    """A training run.

    Attributes:
        config: what to train.
        objects: what was given as Python objects instead of names, by field of `config`; cloudpickled.
        quiet: print nothing.
        write: write a run folder.
        bring_weights: return the weights to the caller.
        trace: write what every rank did when into the run folder.
        profile: which steps torch's profiler is to look at; None: none.
        floats: torch's default type of floats in the caller's program, such as "float64"; None: that of the
            ranks.
        starter: the process that starts the ranks, which is told of the run folder and takes it back if the
            run comes to nothing; None: a launcher that knows nothing of run folders.
    """

    config: TrainConfig
    objects: dict[str, bytes] = field(default_factory=dict)
    quiet: bool = False
    write: bool = True
    bring_weights: bool = False
    trace: bool = False
    profile: ProfiledSteps | None = None
    floats: str | None = None
    starter: Address | None = None


@dataclass(frozen=True)
class EvaluateJob:
    """An evaluation of a trained model.

    Attributes:
        config: the configuration of the run, with what is to be different now.
        folder: the run folder.
        part: one of `PARTS`.
        other_data: whether `config.data` is other data than the run was trained on.
    """

    config: TrainConfig
    folder: str
    part: str
    other_data: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyJob:
    """A comparison of parallel with sequential training.

    Attributes:
        config: what to train; its `steps` says for how long.
        dtype: float32 or float64.
    """

    config: TrainConfig
    dtype: str
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanJob:
    """Measurements of the ways in which a training could be run.

    Attributes:
        config: what to train.
        choices: what may be chosen.
        shown: further precisions to measure, for information.
        cores: of this host, that the ranks share.
        deadline: when the measurements are to end, by the clock of the host's communicators.
        least_s: seconds that they get at least, however late they begin.
        exhaustive: measure all ways until then, however slow they seem.
        quiet: print nothing.
    """

    config: TrainConfig
    choices: Choices
    shown: tuple[str, ...]
    cores: Cores
    deadline: float
    least_s: float = 0.0
    exhaustive: bool = False
    quiet: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class LayoutsJob:
    """The memory that layouts of a model would need.

    Attributes:
        config: what would be trained.
        ranks: on how many ranks.
        parallel: the layout; None: every one.
        options: of its way.
    """

    config: TrainConfig
    ranks: int
    parallel: str | None
    options: Options
    objects: dict[str, bytes] = field(default_factory=dict)


Job = TrainJob | EvaluateJob | VerifyJob | PlanJob | LayoutsJob


@dataclass(frozen=True)
class RunOutcome:
    """What a training run brings back to the process that started it.

    Attributes:
        config: the resolved configuration.
        history: one record for each epoch.
        summary: the totals, and the evaluation on the test part.
        folder: the run folder, if one was written.
        shape: of one input of the model.
        outputs: of the model.
        weights: the model's state by name, as tensors, if it was asked for.
    """

    config: TrainConfig
    history: list[EpochRecord]
    summary: Summary
    folder: str | None
    shape: tuple[int, ...]
    outputs: int
    weights: dict[str, Any] | None


def load_job(payload: bytes) -> Job:
    """The job in the bytes that a rank was given."""
    job: Job = pickle.loads(payload)
    return job


def run(entry: str, job: Job, quiet: bool = False) -> object:
    """Plan, say the plan in one line, and run `entry` on every rank.

    Args:
        entry: the function that each rank calls, as "package.module:function".
        job: what it is given.
        quiet: print nothing.

    Returns:
        What the entry returned on rank 0; None when rank 0 ran on another host.

    Raises:
        TuttiError: the input is wrong, or a rank failed.
    """
    if isinstance(job, TrainJob):
        _refuse_loggers(job)
    plan = plan_for(job.config)
    if plan.launcher is Launcher.ALONE or plan.hosts:
        check_early(job, plan)
    say = None if quiet else announce
    if isinstance(job, TrainJob) and job.write and started_by().launcher is Launcher.ALONE:
        with _taking_back() as address:
            return start(entry, pickle.dumps(replace(job, starter=address)), plan, announce=say)
    return start(entry, pickle.dumps(job), plan, announce=say)


@contextmanager
def _taking_back() -> Iterator[Address]:
    """Remove the run folder that the address is told of, if the run fails in its first epoch.

    A rank cannot be relied on for that: whatever fails, it may be ended before it comes to it.
    """
    channel = MpirunChannel(b"")
    try:
        yield channel.address
    except BaseException:
        for path in channel.messages():
            folder = RunFolder(cast("Path", path))
            if folder.begun:
                folder.release_weights()
            else:
                folder.remove()
        raise
    finally:
        channel.close()


def _refuse_loggers(job: TrainJob) -> None:
    """Refuse loggers that cannot be had, before any rank is started.

    Raises:
        UserError: there is none such, a package that it needs is missing, or there is no run to log.
    """
    if logger_names(job.config.log) and not job.write:
        raise BadOption(f"log={job.config.log!r} is for a run with a folder; name one with out=...")


def check_early(job: Job, plan: Placement) -> None:
    """Refuse what no rank could mend, before any is started.

    That takes torch. Where this process has not imported it the ranks find out for themselves: they are there
    as soon as it would be here.

    Args:
        job: what is to be done.
        plan: the ranks that are to be started.

    Raises:
        UserError: a name or an option is wrong, or the job does not fit these ranks.
    """
    config = job.config
    if isinstance(job, TrainJob) and not plan.hosts:
        check_writable(config.out if job.write else None)
    if "torch" in sys.modules or plan.servers or len(plan.hosts) > 1:
        from tutti.run.checks import check_job

        check_job(job, plan.ranks, max(1, len(plan.hosts)))


def announce(line: str) -> None:
    """Print the plan to stdout, and its warnings to stderr."""
    if line.startswith("warning: "):
        print(f"tutti: {line}", file=sys.stderr, flush=True)
    else:
        print(f"plan: {line}", flush=True)


def layout_of(config: TrainConfig, ranks: int) -> Layout | None:
    """How so many ranks hold one model together; None: each has all of it.

    Raises:
        UserError: the layout does not fit them, or what else the configuration says.
    """
    if config.parallel is None:
        return None
    if config.servers:
        raise BadOption("--servers keep the centre of whole models; leave them out, or --parallel")
    if config.balance != "none":
        raise BadOption(
            f"--balance {config.balance} is for ranks with whole models; leave it or --parallel out"
        )
    return Layout.of(config.parallel, config.parallel_options, ranks)


def plan_for(config: TrainConfig) -> Placement:
    """Which ranks run where, for a run of this configuration.

    Raises:
        BadOption: it asks for what cannot be had.
    """
    if config.parallel is not None:
        return _parallel_plan(config, config.parallel)
    single = config.device == "cuda" or config.strategy == "solo"
    workers = "1" if single and config.workers == "auto" and config.hosts is None else config.workers
    plan = make_plan(workers, config.threads, hosts=config.hosts, servers=config.servers)
    split = config.strategy in ("auto", "sync")  # one batch over all workers: each needs a sample of it
    if split and workers == "auto" and plan.workers > config.batch_size and plan.launcher is Launcher.ALONE:
        plan = make_plan(config.batch_size, config.threads, servers=config.servers)
    if config.device == "cuda" and plan.workers > 1:
        raise BadOption(f"--device cuda is for one worker, not {plan.workers}; use -n 1, or --device cpu")
    return plan


def _parallel_plan(config: TrainConfig, parallel: str) -> Placement:
    """The plan for ranks that hold one model together."""
    if config.device == "cuda":
        raise BadOption(f"--parallel {parallel} computes on the CPU; leave --device cuda out")
    asked = ranks_of(parallel)
    workers = (
        str(asked) if asked is not None and config.workers == "auto" and not config.hosts else config.workers
    )
    plan = make_plan(workers, config.threads, hosts=config.hosts, servers=config.servers)
    layout_of(config, plan.workers)
    return plan
