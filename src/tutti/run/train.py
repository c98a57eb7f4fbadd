"""A training run, from the configuration to the run folder. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch._dynamo  # The first optimizer imports it, for a second: better before the ranks are forked.
from torch import nn

from tutti.checkpoint.in_memory import kept_in
from tutti.checkpoint.reading import Checkpoint
from tutti.comm.base import Communicator
from tutti.comm.blocking import BlockingCommunicator
from tutti.errors import BadOption
from tutti.exports.sources import load_from
from tutti.launch.hangs import print_stacks_when_asked
from tutti.launch.placement import split_off_servers
from tutti.launch.stop_request import is_supervised, stoppable
from tutti.launch.usage_sampler import Sampler, sampling
from tutti.records.run import RunStart, World, now
from tutti.records.run_folder import check_writable
from tutti.records.texts import resumed_text
from tutti.run.assembled import AssembledRun, Pulse, RunContext
from tutti.run.build import (
    Task,
    free_given_data,
    prepare_task,
    reseed,
    seeded,
)
from tutti.run.checks import check_predictions, check_recipe
from tutti.run.jobs import Recipe, load_job
from tutti.run.optimization import build_optimizer
from tutti.run.recording import Recording
from tutti.run.restore import anew, found_by, laid_out, refuse_shorter
from tutti.run.saving import is_over
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.strategies import Clip, Strategy
from tutti.strategies.base import Home
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place

R = TypeVar("R")


def work(comm: Communicator, payload: bytes) -> RunOutcome:
    """Train, or serve those who train; every rank calls this (entry point of the ranks)."""
    job = load_job(payload, TrainJob)
    context = RunContext()
    # Nobody watches a process that tutti has not started, itself or by mpirun.
    if isinstance(comm, BlockingCommunicator) and is_supervised():
        if job.hang_timeout_s is not None:
            print_stacks_when_asked()
        context = replace(context, follower=Pulse(comm), on_step=comm.peers.beat)
    return train(comm, job, context)


def train(comm: Communicator, job: TrainJob, context: RunContext) -> RunOutcome:
    """Train, or serve those who train (collective).

    Args:
        comm: all ranks of the job, servers included.
        job: the run.
        context: what it shares with others.

    Raises:
        UserError: the input is wrong.
    """
    config = job.config
    if job.write and job.resume is None and comm.rank == 0 and context.alone:
        check_writable(config.out)
    checkpoint = _checkpoint(comm, job)
    with seeded(config.seed):
        strategy = check_recipe(job, comm.size, comm.hosts)
        recording = Recording(comm, job.trace)
        team = split_off_servers(recording.comm, config.servers, config.levels, config.server_period)
        # All ranks, the workers first, with the numbers that they have among the workers.
        crew = team if team.servers is None else team.servers.comm
        with sampling(crew, job.write and context.alone) as sampler:
            dataset = context.open_data(job, comm)
            if job.memory is None:  # Ranks that come after these read them again.
                free_given_data(job, comm)
            task = prepare_task(job, dataset)
            check_predictions(config, task.dataset)
            if config.weights is not None and checkpoint is None:
                load_from(Path(config.weights), task.module, comm)
            outcome = work_or_serve(
                job,
                team,
                task.module,
                strategy,
                lambda: _train(job, team, task, strategy, context, sampler, recording, checkpoint),
            )
        said = recording.save(outcome.folder if outcome is not None else None)
        if said and not job.quiet:
            print(*said, sep="\n", flush=True)
        return result_for_all(recording.comm, team, outcome)


def _checkpoint(comm: Communicator, job: TrainJob) -> Checkpoint | None:
    """Return the state to go on from: of the memory, else of a folder; None: the run begins."""
    found = None if job.memory is None else kept_in(comm, job.memory)
    return found_by(comm, job.resume) if found is None and job.resume is not None else found


def _train(
    job: TrainJob,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    context: RunContext,
    sampler: Sampler | None,
    recording: Recording,
    checkpoint: Checkpoint | None,
) -> RunOutcome:
    """Train on all ranks of `comm`, each of which holds the whole model or a portion of it."""
    ends = None if context.ends is None else partial(context.ends, comm)
    with laid_out(job, comm, task, strategy, checkpoint, ends) as parts:
        reseed(job.config.seed, 1 + parts.portion.peers.rank)
        if comm.broadcast_object(is_over(job.deadline)):  # before an earlier run's folder is changed
            raise BadOption(
                f"--time-limit is '{job.config.time_limit}', which is over before the first step; give more"
            )
        saved, step, not_restored = parts.saved, 0, tuple[str, ...]()
        if checkpoint is not None and saved is not None:
            refuse_shorter(checkpoint, saved, parts.schedule)
            step, not_restored = checkpoint.step, tuple(anew(saved, parts.workers.worker))
        start = RunStart(
            now(),
            World(comm.size, comm.hosts, torch.get_num_threads()),
            step=step,
            batch_size=parts.config.batch_size,
            lr=parts.config.lr,
            anew=not_restored,
            why=job.takeover if comm.rank == 0 else "",
        )
        if saved is not None and comm.rank == 0 and not job.quiet:
            # Why, whoever has started these ranks has said.
            print(resumed_text(replace(start, why="")), flush=True)
        return AssembledRun(job, comm, parts, context, sampler, recording, start).execute()


def work_or_serve(
    recipe: Recipe, team: Communicator, module: nn.Module, strategy: Strategy, work: Callable[[], R]
) -> R | None:
    """Return the result of a worker's `work`; None on a server, which serves until the workers are done."""
    servers, config = team.servers, recipe.config
    if servers is None or not servers.serving:
        return work()
    assert isinstance(strategy, Centred), "others are refused with servers"
    optimizer = build_optimizer(recipe, module)
    replica = place(module, team, Home.PRIVATE)
    # A request to stop may reach all ranks; the workers act on it.
    with stoppable():
        strategy.serve(servers, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    return None


def result_for_all(comm: Communicator, team: Communicator, result: R | None) -> R:
    """Return the result of this rank: a worker's own, on a server rank 0's (collective over all ranks).

    To a program that mpirun started, all ranks are alike. And a server does not leave before the workers.
    """
    first = result if team is comm else comm.broadcast_object(result)
    return cast("R", first if result is None else result)
