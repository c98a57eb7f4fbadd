"""Real training steps in every way that could be chosen, on ranks that are started once. Runs on every rank.

    rank 0   order ▸ 2 ranks x 1 thread: steps │ order ▸ 1 rank x 2 threads: steps │ order ▸ ...
    rank 1         ▸ 2 ranks x 1 thread: steps │       ▸ sleeps                    │       ▸ ...

The steps are those of the training loop, on the user's data, with loss and metrics. The learning rate is
zero: that is the same work, and no number of steps can make the model diverge.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch._dynamo  # The first optimizer imports it, for a second: better before the ranks are forked.
from torch import nn
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.data import Batches
from tutti.errors import UserError
from tutti.launch.cores import bind
from tutti.launch.placement import share_host
from tutti.replica import Replica
from tutti.run.build import (
    build_optimizer,
    build_strategy,
    open_config_data,
    reseed,
    seeded,
)
from tutti.run.jobs import load_job
from tutti.run.task import Task, prepare_task
from tutti.strategies import Clip, Strategy, Worker
from tutti.strategies.placement import place
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.plan import PlanJob
from tutti.studies.autotune.race import Contender, Timing, race
from tutti.studies.autotune.recommendation import Recommendation
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.trainer import Trainer

WARM: Final = 10
"""One step in so many of a turn is made beforehand and does not count: caches and threads are another's."""

MOST_FOR_CHOICE: Final = 0.75
"""Of the time, if there are other precisions to be measured afterwards."""


@dataclass(frozen=True)
class Order:
    """An order of rank 0 to the ranks.

    Attributes:
        candidate: the way to train.
        steps: how many.
        number: of the order; each takes the samples in another sequence.
    """

    candidate: Candidate
    steps: int
    number: int


@dataclass(frozen=True)
class Stand:
    """A model laid out for some ranks: for all candidates that differ in nothing that this depends on."""

    replica: Replica
    worker: Worker
    optimizer: Optimizer
    strategy: Strategy


class Rehearsal:
    """Makes training steps in any of the ways; one on each rank.

    Args:
        job: what to measure.
        comm: all ranks.
        task: what is learned.
    """

    def __init__(self, job: PlanJob, comm: Communicator, task: Task) -> None:
        self._job, self._comm, self._task = job, comm, task
        self._teams: dict[int, Communicator | None] = {}
        self._stands: dict[tuple[int, str, bool], Stand] = {}
        self._orders = 0

    def measure(self, candidate: Candidate, steps: int) -> Timing:
        """Have so many steps made, on rank 0; the others `follow`.

        Raises:
            UserError: the model cannot be trained like this.
        """
        self._orders += 1
        order = Order(candidate, steps, self._orders)
        self._comm.broadcast_object(order)
        found = self._obey(order)
        assert found is not None, "rank 0 belongs to every team"
        if isinstance(found, UserError):
            raise found
        return found

    def end(self) -> None:
        """Let the other ranks go, on rank 0."""
        self._comm.broadcast_object(None)

    def follow(self) -> None:
        """Make the steps that rank 0 orders, on the other ranks, until it ends."""
        while isinstance(order := self._comm.broadcast_object(None), Order):
            self._obey(order)

    def _obey(self, order: Order) -> Timing | UserError | None:
        """The steps of an order, or why they cannot be made; nothing on ranks that have no part in them."""
        one = order.candidate
        team = self._team(one.ranks)
        if team is None:
            return None
        self._occupy(one, team.rank)
        try:
            # What goes wrong here does so on all ranks of the team. Later errors end the job.
            stand = self._stand(one, team)
            batches = self._batches(one, team, stand, order.number)
        except UserError as error:
            return error
        if order.steps >= WARM // 2:
            self._train(one, team, stand, batches, max(1, order.steps // WARM))
        return self._train(one, team, stand, batches, order.steps)

    def _team(self, ranks: int) -> Communicator | None:
        """The first so many ranks (collective over all, the first time)."""
        if ranks not in self._teams:
            whole = self._comm
            everybody = ranks == whole.size
            self._teams[ranks] = whole if everybody else whole.split(0 if whole.rank < ranks else None)
        return self._teams[ranks]

    def _occupy(self, one: Candidate, rank: int) -> None:
        """Take the cores and threads that this rank would have in a run of its own."""
        groups = share_host(self._job.cores, one.ranks, one.threads).cores
        bind(groups[rank] if groups and one.ranks > 1 else self._job.cores.logical)
        torch.set_num_threads(one.threads)

    def _stand(self, one: Candidate, team: Communicator) -> Stand:
        """The model for this candidate (collective over its ranks)."""
        key = one.ranks, one.layout, one.precision == "fp64"
        if key not in self._stands:
            self._stands[key] = self._build(one, team)
        stand = self._stands[key]
        self._check_fit(stand.replica.module, one)
        return stand

    def _build(self, one: Candidate, team: Communicator) -> Stand:
        config = self._job.config
        strategy = build_strategy(self._job, one.ranks)
        module = self._arithmetic(one).prepare(copy.deepcopy(self._task.module))
        self._check_fit(module, one)
        optimizer = build_optimizer(self._job, module)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        replica = place(module, team, strategy.home)
        worker = strategy.worker(replica, team, optimizer, Clip(config.clip_norm, config.clip_value))
        return Stand(replica, worker, optimizer, strategy)

    def _check_fit(self, module: nn.Module, one: Candidate) -> None:
        task, arithmetic = self._task, self._arithmetic(one)
        check_fit(
            module, task.dataset.train, task.loss, task.metrics, task.dataset.classes, arithmetic=arithmetic
        )

    def _arithmetic(self, one: Candidate) -> Arithmetic:
        return Arithmetic(one.precision, one.layout, self._job.config.device)

    def _batches(self, one: Candidate, team: Communicator, stand: Stand, seed: int) -> Batches:
        part, passes = self._task.dataset.train, stand.strategy.passes
        batches = Batches(part, one.batch_size, team.rank, team.size, passes, seed)
        module = stand.replica.module.train()
        check_smallest_batch(module, batches, arithmetic=self._arithmetic(one))
        return batches

    def _train(
        self, one: Candidate, team: Communicator, stand: Stand, batches: Batches, steps: int
    ) -> Timing:
        history = Trainer(
            comm=team,
            replica=stand.replica,
            worker=stand.worker,
            optimizer=stand.optimizer,
            batches=batches,
            loss=self._task.loss,
            steps=steps,
            metrics=self._task.metrics,
            arithmetic=self._arithmetic(one),
        ).fit()
        samples = sum(record.train.samples for record in history)
        return Timing(steps, samples, sum(record.train.samples / record.samples_per_s for record in history))


def work(comm: Communicator, payload: bytes) -> Recommendation | None:
    """Measure; every rank calls this (entry point of the ranks).

    Args:
        comm: all ranks of the job, on one host.
        payload: a pickled `PlanJob`.

    Returns:
        On rank 0 what was found; nothing elsewhere.

    Raises:
        UserError: the input is wrong.
    """
    job = load_job(payload, PlanJob)
    with seeded(job.config.seed), _borrowed_cores():
        task = prepare_task(job, open_config_data(job, comm))
        reseed(job.config.seed, 1 + comm.rank)
        rehearsal = Rehearsal(job, comm, task)
        if comm.rank:
            rehearsal.follow()
            return None
        if not job.quiet:
            print(task.described(), flush=True)
        found = _measure_all(job, comm, task.module, rehearsal)
        rehearsal.end()
        return found


def _measure_all(job: PlanJob, comm: Communicator, module: nn.Module, rehearsal: Rehearsal) -> Recommendation:
    """First what may be chosen, then other precisions, beside the best of these."""
    choices = job.choices if has_images(module) else replace(job.choices, layouts=job.choices.layouts[:1])
    candidates = choices.candidates()
    # The very first step makes torch import and set up much that all later ones find there. Whatever is wrong
    # with this candidate, the race will find it again.
    with suppress(UserError):
        rehearsal.measure(candidates[0], 1)
    began = comm.clock()
    deadline = max(job.deadline, began + job.least_s)
    end = began + (deadline - began) * (MOST_FOR_CHOICE if job.shown else 1.0)

    def measured(candidates: list[Candidate], end: float) -> list[Contender[Candidate]]:
        return race(candidates, rehearsal.measure, comm.clock, end, exhaustive=job.exhaustive)

    ways = measured(candidates, end)
    others: list[Contender[Candidate]] = []
    if job.shown and comm.clock() < deadline:
        best = Recommendation(ways).pick.candidate
        further = replace(choices, precisions=job.shown).candidates()
        others = measured([best, *further], deadline)
    return Recommendation(ways, others)


def has_images(module: nn.Module) -> bool:
    """Tell whether the model has 4-d weights, of convolutions: the memory format of tensors matters to it."""
    return any(parameter.dim() == 4 for parameter in module.parameters())


@contextmanager
def _borrowed_cores() -> Iterator[None]:
    """Give cores and threads back at the end: with one rank, this process is the caller's."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        yield
    finally:
        bind(cores)
        torch.set_num_threads(threads)
