"""Whether parallel training follows sequential training, on the user's own model. Runs on every rank.

Both sides begin with the same weights and see the same batches, step by step. The sequential side is plain
torch, on rank 0: the whole batch in one backward pass, clipping and optimizer by torch. After each backward
pass the gradients are compared (before clipping), after each step the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.data import Batches
from tutti.data.batches import Update
from tutti.errors import BadOption, NotFinite
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
from tutti.experiments.job import OBJECT, VerifyJob, load_job
from tutti.experiments.serving import result_for_all, serve, serves, take_sides
from tutti.experiments.train import Task, prepare_task
from tutti.strategies import Clip, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.placement import place

TOLERANCES = {
    "float32": {"loss": 1e-5, "gradient": 1e-3, "weights": 1e-5},
    "float64": {"loss": 1e-12, "gradient": 1e-10, "weights": 1e-12},
}
"""The largest relative deviation that rounding explains. Gradients feel each rounding of the weights."""


@dataclass
class Deviation:
    """How far a quantity of the parallel run was from that of the sequential run.

    Attributes:
        allowed: the largest relative deviation that rounding explains.
        largest: the largest one found: the norm of the difference / the norm of the sequential value.
        step: where it was found, from 1.
    """

    allowed: float
    largest: float = 0.0
    step: int = 1

    def note(self, step: int, difference: float, size: float) -> None:
        """Take one comparison into account.

        Raises:
            NotFinite: there is nothing to compare any more.
        """
        relative = difference / size if size else difference
        if not relative < float("inf"):
            raise NotFinite(
                f"the sequential or the parallel run is no longer finite in step {step}; lower --lr"
            )
        if relative > self.largest:
            self.largest, self.step = relative, step


@dataclass(frozen=True)
class Verdict:
    """What the comparison found; equal on all ranks.

    Attributes:
        deviations: of loss, gradient and weights.
        reasons: parts of the model that make the two differ by design.
    """

    deviations: dict[str, Deviation]
    reasons: tuple[str, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether every deviation is within what rounding explains."""
        return all(deviation.largest <= deviation.allowed for deviation in self.deviations.values())


@dataclass
class Sequential:
    """Plain torch on one process."""

    job: VerifyJob
    task: Task
    module: nn.Module
    updates: int
    loss: float = 0.0
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.job, self.module)
        self.schedule = build_schedule(self.job, self.optimizer, self.updates)

    def backward(self, update: Update) -> None:
        """Forward and backward over the whole batch; keep its loss and its gradient."""
        self.optimizer.zero_grad()
        (batch,) = update.passes
        loss = self.task.compute_loss(self.module, batch)
        torch.autograd.backward(loss)
        self.loss = loss.item()
        self.gradient = gradient_of(self.module)

    def step(self, clip: Clip) -> None:
        """Clip as torch does, and step."""
        if clip.value is not None:
            nn.utils.clip_grad_value_(self.module.parameters(), clip.value)
        if clip.norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip.norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


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
            deviations = _compare(job, team, task, strategy)
            verdict = Verdict(deviations, tuple(reasons(task.module, team.size)))
            if team.rank == 0:
                _print(job, team, task, strategy, verdict)
        return result_for_all(comm, team, verdict)


def _refuse_other_training(strategy: Strategy) -> None:
    if strategy.pace is not Pace.TOGETHER:
        raise BadOption(
            f"strategy '{strategy.name}' gives every worker batches of its own, so it does not follow "
            "sequential training; compare one that makes each update together, such as '--strategy sync'"
        )


def reasons(module: nn.Module, workers: int) -> Iterator[str]:
    """What in the model makes parallel training differ from sequential training by design."""
    batch_norm = [
        name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
    ]
    if batch_norm and workers > 1:
        yield (
            f"BatchNorm ('{batch_norm[0]}') normalises with the statistics of each rank's own part of the "
            f"batch; GroupNorm or LayerNorm would not"
        )
    dropout = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    if dropout and workers > 1:
        yield f"Dropout ('{dropout[0]}') draws other random numbers on each rank; switch it off to compare"


def _compare(job: VerifyJob, comm: Communicator, task: Task, strategy: Strategy) -> dict[str, Deviation]:
    config, train = job.config, task.dataset.train
    steps = config.steps
    if steps is None:
        raise BadOption("a comparison needs a number of steps; give --steps 20")
    batches = Batches(train, config.batch_size, comm.rank, comm.size, strategy.passes, config.seed)
    whole = Batches(train, config.batch_size, seed=config.seed)
    # One set of initial weights: rank 0's, which place() gives to all.
    sequential = Sequential(job, task, copy.deepcopy(task.module), steps) if comm.rank == 0 else None
    optimizer = build_optimizer(job, task.module)
    replica = place(task.module, comm, strategy.home)
    clip = Clip(config.clip_norm, config.clip_value)
    schedule = build_schedule(job, optimizer, steps)
    worker = strategy.worker(replica, comm, optimizer, clip)
    found = {name: Deviation(allowed) for name, allowed in TOLERANCES[job.dtype].items()}
    task.module.train()
    for step, (mine, all_of_it) in enumerate(_pairs(batches, whole, steps, comm.rank == 0), start=1):
        reseed(config.seed, step * comm.size + comm.rank)
        if sequential is not None and all_of_it is not None:
            with torch.random.fork_rng(devices=()):
                sequential.backward(all_of_it)
        loss = _forward_backward(task, mine, comm)
        gradient = gradient_of(task.module)
        comm.all_reduce(gradient)
        worker.step()
        if schedule is not None:
            schedule.step()
        if sequential is not None:
            _compare_vectors(found["gradient"], step, gradient, sequential.gradient)
            sequential.step(clip)
            found["loss"].note(step, abs(loss - sequential.loss), abs(sequential.loss))
            _compare_vectors(found["weights"], step, weights_of(task.module), weights_of(sequential.module))
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


def _compare_vectors(deviation: Deviation, step: int, parallel: Tensor, sequential: Tensor) -> None:
    deviation.note(step, (parallel - sequential).norm().item(), sequential.norm().item())


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
    print(f"{'':10} {'largest relative deviation':>26} {'allowed':>9} {'at step':>8}")
    for quantity, found in verdict.deviations.items():
        print(f"{quantity:10} {found.largest:>26.2e} {found.allowed:>9.0e} {found.step:>8}")
    print("\n" + describe(verdict, job.dtype), flush=True)


def describe(verdict: Verdict, dtype: str) -> str:
    """The verdict in words."""
    if verdict.follows:
        return "verdict: parallel training follows sequential training"
    if verdict.reasons:
        return "verdict: parallel training differs from sequential training by design:\n  " + "\n  ".join(
            verdict.reasons
        )
    text = "verdict: parallel training does NOT follow sequential training"
    if dtype == "float32":
        text += "; with --dtype float64 rounding is no longer a possible reason"
    return text
