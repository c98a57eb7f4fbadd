"""Training steps with every candidate, on ranks that are started once. Runs on every rank.

    rank 0   order ▸ 2 ranks x 1 thread: steps │ order ▸ 1 rank x 2 threads: steps │ order ▸ ...
    rank 1         ▸ 2 ranks x 1 thread: steps │       ▸ sleeps                    │       ▸ ...

The steps are those of the training loop, on the user's data, with loss and metrics. The learning rate is
zero: the work is the same, and the model cannot diverge. The short trainings that decide on a precision
(`short_training.py`) use the real learning rate; only rank 0 runs them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.data import Batches
from tutti.errors import BadOption, UserError
from tutti.exports.sources import load_from
from tutti.launch.busy_cores import ThreadTimes, thread_times
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
from tutti.run.shared_data import SharedData
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.plan import PlanJob, run_length
from tutti.studies.autotune.race import WARM_UP_STEPS, Entry, Timing, race
from tutti.studies.autotune.recommendation import Recommendation
from tutti.studies.autotune.short_training import short_trainings
from tutti.studies.autotune.twins import LEAST_UPDATES, ORDERS, REMEDY, Twins, updates_within
from tutti.training.precision import Arithmetic
from tutti.training.preflight import check_fit, check_smallest_batch, try_gradient
from tutti.training.run_parts import Schedule
from tutti.training.trainer import Trainer

WARM: Final = 10
"""A turn has 1 / WARM of its time to warm up: another candidate used the caches and threads."""

FOR_CHOICE: Final = 0.4
"""The share of the time for the race, if another precision is tried afterwards ..."""

FOR_SPEED: Final = 0.3
"""... and the share of the remaining time for its speed. The rest is for short trainings."""

Order = tuple[Candidate, int]
"""An order of rank 0 to the ranks: the way to train, and the number of steps."""


class Rehearsal:
    """Makes training steps with any candidate; there is one on each rank."""

    def __init__(self, job: PlanJob, comm: Communicator, task: Task) -> None:
        self._job, self._comm, self._task = job, comm, task
        self._teams: dict[int, Communicator | None] = {}
        self._assemblies: dict[tuple[int, str, bool], Assembly] = {}
        self._faults: dict[tuple[int, str, str], UserError | None] = {}
        self._orders = 0

    def measure(self, candidate: Candidate, steps: int) -> Timing:
        """Make steps on all ranks (called on rank 0, while the others `follow`)."""
        self._comm.broadcast_object((candidate, steps))
        timing = self._obey((candidate, steps))
        assert timing is not None, "rank 0 belongs to every team"
        if isinstance(timing, UserError):
            raise timing
        return timing

    def end(self) -> None:
        """Release the other ranks (called on rank 0)."""
        self._comm.broadcast_object(None)

    def follow(self) -> None:
        """Make the steps that rank 0 orders, until it ends."""
        while (order := self._comm.broadcast_object(None)) is not None:
            self._obey(cast("Order", order))

    def compare_twins(self, one: Candidate, clock: Callable[[], float], deadline: float) -> Twins:
        """Train briefly in fp32 and in the precision of `one` (called on rank 0).

        One rank with all cores trains: if it fails, the others go on, and the updates are the same for any
        number of ranks.
        """
        job, samples = self._job, len(self._task.dataset.train)
        candidate = replace(one, ranks=1, threads=max(1, len(job.cores.physical)))
        pair = replace(candidate, precision="fp32"), candidate
        try:
            update_s = sum(self.measure(each, WARM_UP_STEPS).seconds / WARM_UP_STEPS for each in pair)
        except UserError as error:
            return Twins(one.precision, problem=f"it cannot be trained on one rank: {error}")
        run = run_length(job.config, samples)
        updates = updates_within(deadline - clock(), update_s, run)
        if run < LEAST_UPDATES:
            return Twins(one.precision, problem=f"the run's {run} updates are too few to compare losses")
        if updates < LEAST_UPDATES:
            least = LEAST_UPDATES * ORDERS * update_s
            return Twins(one.precision, problem=f"short trainings would take {least:.0f} s more: {REMEDY}")
        alone = self._team(1)
        assert alone is not None, "rank 0 belongs to every team"
        self._occupy(pair[0], 0)
        return short_trainings(job, alone, self._task, pair, updates, lambda: clock() > deadline)

    def _obey(self, order: Order) -> Timing | UserError | None:
        """Return the timing of an order, or why its steps fail; None on ranks outside its team."""
        one, steps = order
        self._orders += 1
        team = self._team(one.ranks)
        if team is None:
            return None
        self._occupy(one, team.rank)
        try:
            # An error here occurs on all ranks of the team. Later errors end the job.
            parts = self._assembly(one, team)
            part, passes = parts.schedule.batches.part, parts.schedule.batches.passes
            # The number of the order is the seed: each order has another sequence of samples.
            batches = Batches(part, one.batch_size, team.rank, team.size, passes, self._orders)
            model, arithmetic = parts.task.module.train(), parts.task.objective.arithmetic
            check_smallest_batch(model, batches, arithmetic=arithmetic)
            self._try(one, parts, team)
        except UserError as error:
            return error
        try:
            if steps >= WARM // 2:
                _train(parts, Schedule(batches, steps=max(1, steps // WARM)))
            return _train(parts, Schedule(batches, steps=steps))
        except torch.OutOfMemoryError as error:  # of a GPU, where there is one rank
            torch.cuda.empty_cache()
            return BadOption(f"the GPU's memory is too small: {str(error).partition('.')[0]}")

    def _try(self, one: Candidate, parts: Assembly, team: Communicator) -> None:
        """Try a step, and raise if it fails on any rank (collective over the team).

        If a later step failed on one rank, the others would wait for it.
        """
        key = one.ranks, one.precision, one.layout
        if key not in self._faults:
            part, objective, fault = self._task.dataset.train, parts.task.objective, None
            try:
                try_gradient(parts.task.module, part, objective)
            except UserError as error:
                fault = error
            faults = cast("list[UserError | None]", team.all_gather_objects(fault))
            self._faults[key] = next(filter(None, faults), None)
        if (found := self._faults[key]) is not None:
            raise found

    def _team(self, ranks: int) -> Communicator | None:
        """Return the first `ranks` ranks as a team (collective over all, the first time)."""
        if ranks not in self._teams:
            whole = self._comm
            everybody = ranks == whole.size
            self._teams[ranks] = whole if everybody else whole.split(0 if whole.rank < ranks else None)
        return self._teams[ranks]

    def _occupy(self, one: Candidate, rank: int) -> None:
        """Take the cores and threads that this rank would have in a run."""
        groups = share_host(self._job.cores, one.ranks, one.threads).cores
        bind(groups[rank] if groups and one.ranks > 1 else self._job.cores.logical)
        torch.set_num_threads(one.threads)

    def _assembly(self, one: Candidate, team: Communicator) -> Assembly:
        """Return the assembly for a candidate (collective over its team).

        Candidates with the same ranks and layout share it.
        """
        key = one.ranks, one.layout, one.precision == "fp64"
        arithmetic = Arithmetic(one.precision, one.layout, self._job.config.device)
        objective = replace(self._task.objective, arithmetic=arithmetic)
        if key not in self._assemblies:
            module = arithmetic.prepare(copy.deepcopy(self._task.module))
            check_fit(module, self._task.dataset.train, objective)
            config = replace(one.applied_to(self._job.config), schedule=None, schedule_options={})
            job, strategy = replace(self._job, config=config), build_strategy(self._job, one.ranks)
            parts = assemble(job, team, self._task, strategy, Whole(module, team, strategy))
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
    """Measure on every rank (entry point). Rank 0 returns the recommendation."""
    job = load_job(payload, PlanJob)
    with seeded(job.config.seed), _borrowed_cores():
        opened = open_config_data if job.data is None else SharedData(job.data, one_run=True).open
        task = prepare_task(job, opened(job, comm))
        if job.config.weights is not None:
            load_from(Path(job.config.weights), task.module, comm.rank == 0)
        reseed(job.config.seed, 1 + comm.rank)
        rehearsal = Rehearsal(job, comm, task)
        before, began, recommendation = thread_times(), comm.clock(), None
        if comm.rank:
            rehearsal.follow()
        else:
            if not job.quiet:
                print(task.described(), flush=True)
            recommendation = _measure_all(job, comm, task, rehearsal)
            samples, seconds = len(task.dataset.train), comm.clock() - began
            recommendation = replace(recommendation, seconds=seconds, samples=samples)
            rehearsal.end()
        waited = share_waited(comm, before, thread_times())
        return recommendation and replace(recommendation, waited=waited)


def share_waited(comm: Communicator, before: ThreadTimes | None, after: ThreadTimes | None) -> float:
    """Return the share of their runnable time in which ranks waited for a core (collective)."""
    times = (0.0, 0.0)
    if before is not None and after is not None:
        times = after.ran - before.ran, after.waited - before.waited
    gathered = cast("list[tuple[float, float]]", comm.all_gather_objects(times))
    ran, waited = map(sum, zip(*gathered, strict=True))
    return waited / max(ran + waited, 1e-9)


def _measure_all(job: PlanJob, comm: Communicator, task: Task, rehearsal: Rehearsal) -> Recommendation:
    """Measure the choices that change no result, then another precision beside the best of them."""
    clock, samples = comm.clock, len(task.dataset.train)
    choices = job.choices.for_maps(most_maps(task.module))
    candidates = choices.candidates()
    began, allowed_s, dares = clock(), job.budget_s, bool(job.dared)

    def end_of_race(update_s: float) -> float:
        nonlocal allowed_s, dares
        allowed_s = min(allowed_s, job.allowance_s(samples, update_s))
        for_twins_s = allowed_s * (1 - FOR_CHOICE) * (1 - FOR_SPEED)
        dares = dares and for_twins_s >= 2 * ORDERS * LEAST_UPDATES * update_s
        if not dares:
            return began + allowed_s
        # A single candidate needs only one step.
        return began + allowed_s * FOR_CHOICE if len(candidates) > 1 else clock()

    ways = race(candidates, rehearsal.measure, clock, end_of_race, exhaustive=job.exhaustive)
    recommendation, deadline = Recommendation(ways, allowed_s=allowed_s), began + allowed_s
    if not job.dared:
        return recommendation
    best = recommendation.pick.candidate
    # The fastest shape hardly depends on the precision; the fastest layout may.
    further = replace(choices, precisions=job.dared, shapes=((best.ranks, best.threads),)).candidates()
    if not dares or clock() >= deadline:
        return replace(recommendation, others=[Entry(one) for one in further])
    end = clock() + (deadline - clock()) * FOR_SPEED
    others = race([best, *further], rehearsal.measure, clock, lambda _: end)
    recommendation = replace(recommendation, others=others)
    faster = recommendation.faster
    if faster is None:
        return recommendation
    return replace(recommendation, twins=rehearsal.compare_twins(faster.candidate, clock, deadline))


def most_maps(module: nn.Module) -> int:
    """Return the maps of the widest convolution; 0: there is none, and the layout does not matter."""
    return max((len(parameter) for parameter in module.parameters() if parameter.dim() == 4), default=0)


@contextmanager
def _borrowed_cores() -> Iterator[None]:
    """Restore cores and threads at the end: a single rank is the caller's own process."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        yield
    finally:
        bind(cores)
        torch.set_num_threads(threads)
