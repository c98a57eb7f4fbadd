"""Whether parallel training follows sequential training, on the user's own model. Runs on every rank.

Both sides begin with the same weights and see the same batches, step by step. The sequential side is plain
torch, on rank 0: the whole batch in one backward pass, clipping and optimizer by torch. After each backward
pass the gradients are compared (before clipping), after each step the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.data import Batch, Batches, Update
from tutti.errors import BadOption
from tutti.experiments import report
from tutti.experiments.assemble import (
    build_optimizer,
    build_schedule,
    build_strategy,
    open_config_data,
    part_sizes,
    reseed,
    seeded,
)
from tutti.experiments.deviation import Deviation, Distance, Verdict, describe, deviations, reasons, table
from tutti.experiments.job import OBJECT, VerifyJob, load_job
from tutti.experiments.serving import result_for_all, serve, serves, take_sides
from tutti.experiments.train import Task, prepare_task
from tutti.strategies import Clip, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.placement import place


@dataclass(frozen=True)
class State:
    """A run at one step.

    Attributes:
        loss: the mean over the batch.
        gradient: of all trainable parameters end to end, before clipping, in float64.
        weights: after the step, likewise.
    """

    loss: float
    gradient: Tensor
    weights: Tensor


class Sequential:
    """Plain torch on one process."""

    def __init__(self, job: VerifyJob, task: Task, updates: int) -> None:
        self.task, self.module = task, copy.deepcopy(task.module)
        self.optimizer = build_optimizer(job, self.module)
        self.schedule = build_schedule(job, self.optimizer, updates)
        self.loss, self.gradient = 0.0, torch.zeros(0)

    def backward(self, batch: Batch) -> None:
        """Forward and backward over the whole batch; keep its loss and its gradient."""
        self.optimizer.zero_grad()
        # The parallel run draws its random numbers from where this one drew them.
        with torch.random.fork_rng(devices=()):
            loss = self.task.compute_loss(self.module, batch)
        torch.autograd.backward(loss)
        self.loss, self.gradient = loss.item(), gradient_of(self.module)

    def step(self, clip: Clip) -> State:
        """Clip as torch does, and step."""
        if clip.value is not None:
            nn.utils.clip_grad_value_(self.module.parameters(), clip.value)
        if clip.norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip.norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return State(self.loss, self.gradient, weights_of(self.module))


class _Pair:
    """The sequential run, and the same once more with the samples of every batch in reverse order."""

    def __init__(self, job: VerifyJob, task: Task, updates: int) -> None:
        self.plain, self.reversed = Sequential(job, task, updates), Sequential(job, task, updates)

    def backward(self, update: Update) -> None:
        """Forward and backward of both."""
        (batch,) = update.passes
        self.plain.backward(batch)
        self.reversed.backward(Batch(batch.inputs.flip(0), batch.targets.flip(0), batch.share))

    def step(self, clip: Clip, parallel: State, found: dict[str, Deviation], step: int) -> None:
        """Step, and note how far the parallel run is, and how far rounding takes the sequential one."""
        plain, reverse = self.plain.step(clip), self.reversed.step(clip)
        _note({name: one.found for name, one in found.items()}, step, parallel, plain)
        _note({name: one.rounding for name, one in found.items()}, step, reverse, plain)


def work(comm: Communicator, payload: bytes) -> Verdict:
    """Compare; every rank calls this (entry point of the ranks).

    Args:
        comm: all ranks of the job, servers included.
        payload: a pickled `VerifyJob`.

    Raises:
        UserError: the input is wrong.
    """
    job = load_job(payload)
    assert isinstance(job, VerifyJob)
    with seeded(job.config.seed):
        servers = job.config.servers
        strategy = build_strategy(job, comm.size - servers, comm.hosts, servers)
        _refuse_other_training(strategy)
        team = take_sides(comm, job.config)
        task = prepare_task(job, open_config_data(job, comm))
        verdict = None
        if serves(team):
            serve(job, team, task.module, strategy)
        else:
            verdict = Verdict(_compare(job, team, task, strategy), tuple(reasons(task.module, team.size)))
            if team.rank == 0:
                _print(job, team, task, strategy, verdict)
        return result_for_all(comm, team, verdict)


def _refuse_other_training(strategy: Strategy) -> None:
    if strategy.pace is not Pace.TOGETHER:
        raise BadOption(
            f"strategy '{strategy.name}' gives every worker batches of its own, so it does not follow "
            "sequential training; compare one that makes each update together, such as '--strategy sync'"
        )


def _compare(job: VerifyJob, comm: Communicator, task: Task, strategy: Strategy) -> dict[str, Deviation]:
    config, train = job.config, task.dataset.train
    steps = config.steps
    if steps is None:
        raise BadOption("a comparison needs a number of steps; give --steps 20")
    batches = Batches(train, config.batch_size, comm.rank, comm.size, strategy.passes, config.seed)
    whole = Batches(train, config.batch_size, seed=config.seed)
    # One set of initial weights: rank 0's, which place() gives to all.
    sequential = _Pair(job, task, steps) if comm.rank == 0 else None
    optimizer = build_optimizer(job, task.module)
    replica = place(task.module, comm, strategy.home)
    clip = Clip(config.clip_norm, config.clip_value)
    schedule = build_schedule(job, optimizer, steps)
    worker = strategy.worker(replica, comm, optimizer, clip)
    found = deviations(job.dtype)
    task.module.train()
    for step, (mine, all_of_it) in enumerate(_pairs(batches, whole, steps, comm.rank == 0), start=1):
        reseed(config.seed, step * comm.size + comm.rank)
        if sequential is not None and all_of_it is not None:
            sequential.backward(all_of_it)
        loss = _forward_backward(task, mine, comm)
        gradient = gradient_of(task.module)
        comm.all_reduce(gradient)
        worker.step()
        if schedule is not None:
            schedule.step()
        if sequential is not None:
            sequential.step(clip, State(loss, gradient, weights_of(task.module)), found, step)
    worker.finish()
    agreed = comm.broadcast_object(found)
    assert isinstance(agreed, dict)
    return agreed


def gradient_of(module: nn.Module) -> Tensor:
    """The gradient of all trainable parameters end to end, in float64; zero where there is none."""
    trained = [p for p in module.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return torch.cat([grad.detach().reshape(-1).double() for grad in grads])


def weights_of(module: nn.Module) -> Tensor:
    """All trainable parameters end to end, in float64."""
    return torch.cat([p.detach().reshape(-1).double() for p in module.parameters() if p.requires_grad])


def _note(distances: dict[str, Distance], step: int, one: State, other: State) -> None:
    distances["loss"].note(step, abs(one.loss - other.loss), abs(other.loss))
    distances["gradient"].note(
        step, (one.gradient - other.gradient).norm().item(), other.gradient.norm().item()
    )
    distances["weights"].note(step, (one.weights - other.weights).norm().item(), other.weights.norm().item())


def _pairs(
    mine: Batches, whole: Batches, steps: int, with_whole: bool
) -> Iterator[tuple[Update, Update | None]]:
    """The rank's part of each update, and on the rank that trains sequentially all of it."""
    done = 0
    for epoch in count():
        others = whole.epoch(epoch) if with_whole else repeat(None)
        for pair in zip(mine.epoch(epoch), others, strict=False):
            yield pair
            done += 1
            if done == steps:
                return


def _forward_backward(task: Task, update: Update, comm: Communicator) -> float:
    """Add this rank's share to its gradient; returns the loss over the whole batch, equal on all ranks."""
    total = torch.zeros(1, dtype=torch.float64)
    for batch in update.passes:
        if batch.share:
            loss = task.compute_loss(task.module, batch)
            torch.autograd.backward(loss * batch.share)
            total += loss.item() * batch.share
    comm.all_reduce(total)
    return total.item()


def _print(job: VerifyJob, comm: Communicator, task: Task, strategy: Strategy, verdict: Verdict) -> None:
    config, parameters = job.config, sum(p.numel() for p in task.module.parameters() if p.requires_grad)
    dataset = task.dataset
    name = config.model.removeprefix(OBJECT)
    print(report.counts(name, parameters, dataset.name, part_sizes(dataset), dataset.shape))
    ranks = f"{comm.size} rank{'' if comm.size == 1 else 's'}"
    print(f"{config.steps} steps in {job.dtype}: {strategy.name} on {ranks} against plain torch on one\n")
    print(table(verdict), describe(verdict, job.dtype), sep="\n\n", flush=True)
