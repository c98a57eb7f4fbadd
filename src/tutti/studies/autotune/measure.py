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
from dataclasses import replace
from typing import Final, cast

import torch
import torch._dynamo  # The first optimizer imports it, for a second: better before the ranks are forked.
from torch import nn

from tutti.comm.base import Communicator
from tutti.data import Batches
from tutti.errors import UserError
from tutti.launch.cores import bind
from tutti.launch.placement import share_host
from tutti.model_parallel.base import Whole
from tutti.run.build import (
    Assembly,
    Task,
    assemble,
    build_strategy,
    open_config_data,
    prepare_task,
    reseed,
    seeded,
)
from tutti.run.jobs import load_job
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.plan import PlanJob
from tutti.studies.autotune.race import Contender, Timing, race
from tutti.studies.autotune.recommendation import Recommendation
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.run_parts import Schedule
from tutti.training.trainer import Trainer

WARM: Final = 10
"""One step in so many of a turn is made beforehand and does not count: caches and threads are another's."""

MOST_FOR_CHOICE: Final = 0.75
"""Of the time, if there are other precisions to be measured afterwards."""


Order = tuple[Candidate, int]
"""An order of rank 0 to the ranks: the way to train, and how many steps."""


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
        self._assemblies: dict[tuple[int, str, bool], Assembly] = {}
        self._orders = 0

    def measure(self, candidate: Candidate, steps: int) -> Timing:
        """Have so many steps made, on rank 0; the others `follow`.

        Raises:
            UserError: the model cannot be trained like this.
        """
        self._comm.broadcast_object((candidate, steps))
        found = self._obey((candidate, steps))
        assert found is not None, "rank 0 belongs to every team"
        if isinstance(found, UserError):
            raise found
        return found

    def end(self) -> None:
        """Let the other ranks go, on rank 0."""
        self._comm.broadcast_object(None)

    def follow(self) -> None:
        """Make the steps that rank 0 orders, on the other ranks, until it ends."""
        while (order := self._comm.broadcast_object(None)) is not None:
            self._obey(cast("Order", order))

    def _obey(self, order: Order) -> Timing | UserError | None:
        """The steps of an order, or why they cannot be made; nothing on ranks that have no part in them."""
        one, steps = order
        self._orders += 1
        team = self._team(one.ranks)
        if team is None:
            return None
        self._occupy(one, team.rank)
        try:
            # What goes wrong here does so on all ranks of the team. Later errors end the job.
            parts = self._assembly(one, team)
            part, passes = parts.schedule.batches.part, parts.schedule.batches.passes
            # The number of the order: each takes the samples in another sequence.
            batches = Batches(part, one.batch_size, team.rank, team.size, passes, self._orders)
            model, arithmetic = parts.task.module.train(), parts.task.objective.arithmetic
            check_smallest_batch(model, batches, arithmetic=arithmetic)
        except UserError as error:
            return error
        if steps >= WARM // 2:
            _train(parts, Schedule(batches, steps=max(1, steps // WARM)))
        return _train(parts, Schedule(batches, steps=steps))

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

    def _assembly(self, one: Candidate, team: Communicator) -> Assembly:
        """The model laid out for this candidate (collective over its ranks).

        One serves all candidates that differ in nothing that the layout depends on.
        """
        key = one.ranks, one.layout, one.precision == "fp64"
        arithmetic = Arithmetic(one.precision, one.layout, self._job.config.device)
        objective = replace(self._task.objective, arithmetic=arithmetic)
        if key not in self._assemblies:
            module = arithmetic.prepare(copy.deepcopy(self._task.module))
            check_fit(module, self._task.dataset.train, objective)
            config = replace(one.applied_to(self._job.config), schedule=None, schedule_options={})
            job, strategy = replace(self._job, config=config), build_strategy(self._job, one.ranks)
            parts = assemble(job, team, self._task, strategy, Whole(module, team))
            for group in parts.workers.optimizer.param_groups:
                group["lr"] = 0.0
            self._assemblies[key] = parts
        parts = self._assemblies[key]
        check_fit(parts.task.module, self._task.dataset.train, objective)
        return replace(parts, task=replace(parts.task, objective=objective))


def _train(parts: Assembly, schedule: Schedule) -> Timing:
    history = Trainer(parts.workers, parts.task.objective, schedule).fit()
    samples = sum(record.train.samples for record in history)
    seconds = sum(record.train.samples / record.samples_per_s for record in history)
    return Timing(schedule.updates, samples, seconds)


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
