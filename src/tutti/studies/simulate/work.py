"""The rows of a simulation; the ranks of this machine divide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf, isfinite
from pathlib import Path
from typing import Final, TypeVar, cast

from tutti.comm.base import Communicator
from tutti.errors import BadOption, NotFinite
from tutti.exports.sources import load_from
from tutti.free_memory import free_bytes
from tutti.launch.busy_cores import BUSY, thread_times
from tutti.model_parallel.memory import state_per_byte
from tutti.parameter_server.base import Centre
from tutti.run.build import Task, open_config_data, prepare_task, seeded
from tutti.run.checks import check_recipe
from tutti.run.config import DEFAULT_EPOCHS
from tutti.run.jobs import Recipe, load_job
from tutti.run.optimization import build_optimizer
from tutti.run.start import announce
from tutti.strategies import Strategy, named
from tutti.strategies.base import Pace
from tutti.studies.autotune.measure import share_waited
from tutti.studies.simulate.calibrate import calibrated, estimated_steps, measured_steps
from tutti.studies.simulate.failures import Failures, goodput
from tutti.studies.simulate.learning import learn
from tutti.studies.simulate.machine import Machine
from tutti.studies.simulate.pattern import CommPattern
from tutti.studies.simulate.question import SimulateJob, Way
from tutti.studies.simulate.result import SimulatedRow, Simulation
from tutti.studies.simulate.step_times import StepTimes
from tutti.studies.simulate.timing import replay

OVERHEAD: Final = 2
"""The seconds of a virtual step / a real step: this process copies the messages."""

VECTORS: Final = 3
"""Vectors of a virtual worker, without the optimizer's: weights, gradients, and one to exchange."""

R = TypeVar("R")


@dataclass(frozen=True)
class PlannedRow:
    """A row to simulate."""

    row: SimulatedRow
    recipe: Recipe
    strategy: Strategy
    batch: int  # samples of a worker's step


def work(comm: Communicator, payload: bytes) -> Simulation:
    """Simulate all rows (entry point); the result is the same on all ranks."""
    job = load_job(payload, SimulateJob)
    with seeded(job.config.seed):
        rows = plan_rows(job)
        task = opened(job, comm)
        return simulated(job, comm, task, rows)


def opened(job: SimulateJob, comm: Communicator) -> Task:
    """Return data and model (collective), and describe them."""
    task = prepare_task(job, open_config_data(job, comm))
    if job.config.weights is not None:
        load_from(Path(job.config.weights), task.module, comm.rank == 0)
    if comm.rank == 0 and not job.quiet:
        print(task.described(), flush=True)
    return task


def simulated(
    job: SimulateJob,
    comm: Communicator,
    task: Task,
    rows: Sequence[PlannedRow | SimulatedRow],
    budget_s: float = inf,
) -> Simulation:
    """Simulate the planned rows (collective); after `budget_s` no further row begins."""
    timing, machine = job.question.timing, job.question.machine
    plans = {at: one for at, one in enumerate(rows) if isinstance(one, PlannedRow)}
    busy = comm.size if timing else _at_a_time(job, comm, task, [*plans.values()])
    times = _step_times(job, comm, task, {plan.batch for plan in plans.values()})
    if not timing:
        _announce_time(job, comm, task, [*plans.values()], times, busy)
    # The largest rows come first; a free rank takes the next one.
    order = sorted(plans, key=lambda at: -plans[at].row.workers)
    take, mine, began = comm.counter().add, dict[int, SimulatedRow](), comm.clock()
    while comm.rank < busy and (number := take(1)) < len(order):
        plan = plans[order[number]]
        if number and comm.clock() - began > budget_s:
            mine[order[number]] = replace(plan.row, error="the --budget was used up")
            continue
        row = (_timed if timing else _learned)(plan, machine, task, times[plan.batch])
        mine[order[number]] = row
        if not (job.quiet or timing):
            print(f"simulated: {row.way}, workers: {row.workers:,}, {row.brief()}", flush=True)
    found = cast("list[dict[int, SimulatedRow]]", comm.all_gather_objects(mine))
    done = {at: row for part in found for at, row in part.items()}
    every = _possible([one if isinstance(one, SimulatedRow) else done[at] for at, one in enumerate(rows)])
    return Simulation(every, _assumptions(machine, times))


def _assumptions(machine: Machine, times: dict[int, StepTimes]) -> str:
    """Return the assumptions of the rows, in a sentence."""
    steps = ", ".join(f"{1e3 * one.median:.3g} ms with {batch} samples" for batch, one in times.items())
    how = "timed here" if machine.flops_per_s is None else f"by flops_per_s of '{machine.name}'"
    text = (
        f"assumed: {machine.ranks_per_host} workers on a host, {machine.network} between hosts; steps take "
        f"{steps}, {how}"
    )
    if machine.price_per_hour is not None:
        text += f"; cost: of the simulated steps, at {machine.price_per_hour:g} for a host and hour"
    return text


def _announce_time(
    job: SimulateJob,
    comm: Communicator,
    task: Task,
    plans: Sequence[PlannedRow],
    times: dict[int, StepTimes],
    busy: int,
) -> None:
    """Print the estimated time of the trainings (collective)."""
    if job.question.machine.flops_per_s is not None:
        times = {batch: measured_steps(job, comm, task, batch) for batch in sorted(times)}
    seconds = OVERHEAD * sum(
        one.row.workers * _steps_of(one, task) * times[one.batch].median for one in plans
    )
    if comm.rank == 0 and not job.quiet:
        seconds = max(1.0, seconds / min(busy, comm.size, len(plans)))
        print(f"{len(plans)} simulated trainings take about {seconds:,.0f} s", flush=True)


def _steps_of(plan: PlannedRow, task: Task) -> int:
    """Return the number of steps of each worker."""
    config = plan.recipe.config
    update = config.batch_size * (1 if plan.strategy.pace is Pace.TOGETHER else plan.row.workers)
    samples = (config.epochs or DEFAULT_EPOCHS) * len(task.dataset.train)
    return config.steps or max(1, samples // update)


def plan_rows(job: SimulateJob) -> list[PlannedRow | SimulatedRow]:
    """Return the rows to simulate, by way; a row that is impossible has an error."""
    question = job.question
    if not question.ways:
        raise BadOption("nothing to simulate; give --strategies at least one, such as sync")
    rows = [_planned(job, way, workers) for way in question.ways for workers in sorted({*question.workers})]
    return _possible(rows)


def _possible(rows: list[R]) -> list[R]:
    """Return the rows; if all of them have errors, raise the first one."""
    errors = [one.error for one in rows if isinstance(one, SimulatedRow) and one.error]
    if len(errors) == len(rows):
        raise BadOption(errors[0])
    return rows


def _planned(job: SimulateJob, way: Way, workers: int) -> PlannedRow | SimulatedRow:
    machine, kind = job.question.machine, named(way.strategy)
    sizes = machine.hosts(workers)
    hosts = len(sizes)
    row = SimulatedRow(way.name, workers, hosts)
    try:
        machine.network.barrier_s(sizes)
    except ValueError as error:  # The topology has too few hosts.
        return replace(row, error=f"{error}; give fewer --workers, or another --network")
    if kind.most_hosts is not None and hosts > kind.most_hosts:
        why = f"strategy '{kind.name}' needs one memory for all workers, and {workers:,} fill {hosts:,} hosts"
        return replace(row, error=f"{why}; give fewer --workers, or another strategy")
    servers, together = int(Centre in kind.needs and hosts > 1), kind.pace is Pace.TOGETHER
    try:
        recipe = replace(job, config=job.config_of(way, workers, servers, together))
        strategy = check_recipe(recipe, workers + servers, hosts)
    except BadOption as error:
        return replace(row, error=str(error))
    return PlannedRow(row, recipe, strategy, -(-recipe.config.batch_size // (workers if together else 1)))


def _at_a_time(job: SimulateJob, comm: Communicator, task: Task, plans: Sequence[PlannedRow]) -> int:
    """Return the number of rows that memory can hold at a time (collective).

    Raises:
        BadOption: it cannot hold a single one.
    """
    nbytes = sum(one.nbytes for one in task.module.parameters())
    each = nbytes * (VECTORS + state_per_byte(lambda module: build_optimizer(job, module)))
    most = max(plan.row.workers for plan in plans)
    free = cast("int | None", comm.broadcast_object(free_bytes()))
    if free is not None and most * each > free:
        raise BadOption(
            f"{most:,} virtual workers of {each / 1e6:,.1f} MB need {most * each / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB are free; give fewer --workers, or --timing, which holds no gradients"
        )
    return comm.size if free is None else int(free // (most * each))


def _step_times(job: SimulateJob, comm: Communicator, task: Task, batches: set[int]) -> dict[int, StepTimes]:
    """Return the seconds of a worker's step by its samples: from the machine, or else timed here."""
    machine = job.question.machine
    if machine.flops_per_s is not None:
        return {batch: estimated_steps(machine, task, batch) for batch in batches}
    before = thread_times()
    times = {batch: measured_steps(job, comm, task, batch) for batch in sorted(batches)}
    waited = share_waited(comm, before, thread_times())
    if comm.rank == 0 and waited > BUSY and not job.quiet:
        announce(
            f"warning: the timed steps waited {waited:.0%} of the time for a core, as other programs "
            "compute, so they are too slow; simulate again on an idle machine"
        )
    if job.calibrate is not None and comm.rank == 0:
        text = calibrated(machine, task, max(batches), times[max(batches)]).written()
        Path(job.calibrate).write_text(text, encoding="utf-8")
    return times


def _timed(plan: PlannedRow, machine: Machine, task: Task, times: StepTimes) -> SimulatedRow:
    """Replay the communication of a row's workers."""
    row, config, strategy = plan.row, plan.recipe.config, plan.strategy
    together = strategy.pace is Pace.TOGETHER
    update, steps = config.batch_size * (1 if together else row.workers), _steps_of(plan, task)
    hosts = machine.hosts(row.workers)
    try:
        servers = int(Centre in strategy.needs)
        pattern = CommPattern(strategy, config.optimizer, task.parameters, servers)
        timing = replay(
            pattern,
            hosts,
            machine.network,
            times.scaled(1 / strategy.passes),
            steps,
            speeds=[*islice(cycle(machine.speeds), len(hosts))],
            input_batches_per_s=machine.samples_per_s * strategy.passes / plan.batch,
            seed=config.seed,
        )
    except BadOption as error:
        return replace(row, error=str(error))
    if row.workers > 1 and not timing.bytes_per_worker_step:
        why = f"workers exchange nothing in {steps} steps; give more --epochs or --steps, or fewer workers"
        return replace(row, error=why)
    row = replace(
        row,
        steps=steps,
        samples=steps * update,
        seconds=timing.seconds,
        computes=timing.utilisation,
        bytes_per_step=timing.bytes_per_worker_step,
        staleness=timing.staleness,
    )
    return _with_failures(row, plan, machine)


def _learned(plan: PlannedRow, machine: Machine, task: Task, times: StepTimes) -> SimulatedRow:
    """Train the workers of a row."""
    row = plan.row
    try:
        history = learn(plan.recipe, task, plan.strategy, machine, row.workers, plan.batch, times)
    except NotFinite as error:
        return replace(row, error=f"diverged: {error}")
    ranks = [record for epoch in history for record in epoch.ranks]
    seconds = sum(epoch.seconds["total"] - epoch.seconds["validation"] for epoch in history)
    late = sum((Counter(record.staleness) for record in ranks), Counter[int]())
    last = history[-1].validation or history[-1].train
    row = replace(
        row,
        steps=_steps_of(plan, task),
        samples=sum(epoch.train.samples for epoch in history),
        seconds=seconds,
        computes=sum(one.stages["forward"] + one.stages["backward"] for one in ranks) / row.workers / seconds,
        bytes_per_step=sum(one.bytes_sent for one in ranks) / sum(one.updates for one in ranks),
        staleness=sum(by * count for by, count in late.items()) / max(1, late.total()),
        loss=last.loss,
        metrics=last.metrics,
    )
    return _with_failures(row, plan, machine)


def _with_failures(row: SimulatedRow, plan: PlannedRow, machine: Machine) -> SimulatedRow:
    """Add the share of the work that failures leave, and the cost of the hosts."""
    left, cost = 1.0, None
    if isfinite(machine.hours_between):
        failures = Failures(
            machine.hours_between, machine.repair_s, machine.checkpoint_every_s, machine.restart_s
        )
        left = goodput(failures, plan.strategy.pace, row.hosts, plan.recipe.config.servers)
    if machine.price_per_hour is not None and left:
        cost = row.hosts * machine.price_per_hour * row.seconds / left / 3600
    return replace(row, goodput=left, cost=cost)
