"""The rows of a simulation, dealt to the cores of this machine. Runs on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from tutti.comm.base import Communicator
from tutti.errors import BadOption, NotFinite
from tutti.exports.sources import load_from
from tutti.free_memory import free_bytes
from tutti.model_parallel.memory import state_per_byte
from tutti.parameter_server.base import Centre
from tutti.records.run import EpochRecord
from tutti.records.texts import better_by_name
from tutti.run.build import Task, open_config_data, prepare_task, seeded
from tutti.run.checks import check_recipe
from tutti.run.jobs import Recipe, load_job
from tutti.run.optimization import build_optimizer
from tutti.strategies import Strategy, named
from tutti.strategies.base import Pace
from tutti.studies.simulate.calibrate import calibrated, measured_steps, reckoned_steps
from tutti.studies.simulate.learning import learn
from tutti.studies.simulate.question import Question, SimulateJob, Way
from tutti.studies.simulate.result import Row, Simulation
from tutti.studies.simulate.step_times import StepTimes

VECTORS: Final = 3
"""Vectors of a virtual worker, besides the optimizer's: weights, gradients, and one that it exchanges."""


@dataclass(frozen=True)
class Plan:
    """A row that is to be simulated; `batch` are the samples of a worker's step."""

    row: Row
    recipe: Recipe
    strategy: Strategy
    batch: int


def work(comm: Communicator, payload: bytes) -> Simulation:
    """Simulate all rows (entry point).

    Args:
        comm: ranks of this host.
        payload: a pickled `SimulateJob`.

    Returns:
        What was found; the same on all ranks.

    Raises:
        UserError: the input is wrong, or memory does not hold the virtual workers.
    """
    job = load_job(payload, SimulateJob)
    question = job.question
    with seeded(job.config.seed):
        rows = [planned(job, way, workers) for way in question.ways for workers in sorted(question.workers)]
        for way in question.ways:
            refused = [one.error for one in rows if isinstance(one, Row) and one.way == way.name]
            if len(refused) == len(question.workers):
                raise BadOption(refused[0])
        task = prepare_task(job, open_config_data(job, comm))
        if job.config.weights is not None:
            load_from(Path(job.config.weights), task.module, comm.rank == 0)
        if comm.rank == 0 and not job.quiet:
            print(task.described(), flush=True)
        plans = {at: one for at, one in enumerate(rows) if isinstance(one, Plan)}
        at_a_time = comm.size if question.timing else _at_a_time(job, comm, task, [*plans.values()])
        times = _step_times(job, comm, task, {plan.batch for plan in plans.values()})
        # The largest first; whichever rank is free takes the next one.
        order = sorted(plans, key=lambda at: -plans[at].row.workers)
        take, mine = comm.counter().add, dict[int, Row]()
        while comm.rank < at_a_time and (number := take(1)) < len(order):
            plan = plans[order[number]]
            mine[order[number]] = _simulated(plan, question, task, times[plan.batch])
            if not (job.quiet or question.timing):
                print(
                    f"simulated: {plan.row.way}, {plan.row.workers:,} worker{'s' * (plan.row.workers > 1)}",
                    flush=True,
                )
        found = cast("list[dict[int, Row]]", comm.all_gather_objects(mine))
    done = {at: row for part in found for at, row in part.items()}
    return Simulation([one if isinstance(one, Row) else done[at] for at, one in enumerate(rows)])


def planned(job: SimulateJob, way: Way, workers: int) -> Plan | Row:
    """Return what is to be simulated, or a row that says why it cannot be.

    Raises:
        UnknownName: there is no such strategy, or it has no such option.
    """
    hosts = job.question.machine.hosts(workers)
    row, kind = Row(way.name, workers, hosts), named(way.strategy)
    if kind.most_hosts is not None and hosts > kind.most_hosts:
        return replace(
            row,
            error=f"strategy '{kind.name}' needs the memory of one host, and {workers:,} workers fill {hosts:,} "
            f"hosts of {job.question.machine.ranks_per_host}; give fewer --workers, or another strategy",
        )
    servers = int(Centre in kind.needs and hosts > 1)
    together = kind.pace is Pace.TOGETHER
    recipe = replace(job, config=job.config_of(way, workers, together, servers))
    try:
        strategy = check_recipe(recipe, workers + servers, hosts)
    except BadOption as error:
        return replace(row, error=str(error))
    return Plan(row, recipe, strategy, -(-recipe.config.batch_size // (workers if together else 1)))


def _at_a_time(job: SimulateJob, comm: Communicator, task: Task, plans: Sequence[Plan]) -> int:
    """Return how many ranks have room to simulate at a time (collective).

    Raises:
        BadOption: not even one.
    """
    nbytes = sum(one.nbytes for one in task.module.parameters())
    each = nbytes * (VECTORS + state_per_byte(lambda module: build_optimizer(job, module)))
    most = max(plan.row.workers for plan in plans)
    free = cast("int | None", comm.broadcast_object(free_bytes()))
    if free is not None and most * each > free:
        raise BadOption(
            f"{most:,} virtual workers of {each / 1e6:,.0f} MB need {most * each / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB are free; give fewer --workers, or --timing, which holds no gradients"
        )
    return comm.size if free is None else int(free // (most * each))


def _step_times(job: SimulateJob, comm: Communicator, task: Task, batches: set[int]) -> dict[int, StepTimes]:
    """Return the seconds of a worker's step by its samples, measured where the machine does not say them."""
    machine = job.question.machine
    if machine.flops_per_s is not None:
        return {batch: reckoned_steps(machine, task, batch) for batch in batches}
    times = {batch: measured_steps(job, comm, task, batch) for batch in sorted(batches)}
    if job.calibrate is not None and comm.rank == 0:
        batch = max(batches)
        text = calibrated(machine, task, batch, times[batch]).written()
        Path(job.calibrate).write_text(text, encoding="utf-8")
    return times


def _simulated(plan: Plan, question: Question, task: Task, times: StepTimes) -> Row:
    row, machine = plan.row, question.machine
    try:
        history = learn(plan.recipe, task, plan.strategy, machine, row.workers, times, plan.batch)
    except NotFinite as error:
        return replace(row, error=f"diverged: {error}")
    row = _of_history(row, history, question.goal)
    return replace(row, cost=cost_of(row, machine.price_per_hour))


def _of_history(row: Row, history: Sequence[EpochRecord], goal: float | None) -> Row:
    """Return a row with the figures of a run on virtual workers."""
    ranks = [record for epoch in history for record in epoch.ranks]
    spent = [epoch.seconds["total"] - epoch.seconds["validation"] for epoch in history]
    computed = sum(record.stages["forward"] + record.stages["backward"] for record in ranks)
    late: Counter[int] = sum((Counter(record.staleness) for record in ranks), Counter())
    last = history[-1].validation or history[-1].train
    return replace(
        row,
        samples=sum(epoch.train.samples for epoch in history),
        seconds=sum(spent),
        computes=computed / row.workers / sum(spent),
        bytes_per_step=sum(record.bytes_sent for record in ranks) / sum(record.updates for record in ranks),
        staleness=sum(by * count for by, count in late.items()) / late.total() if late else None,
        loss=last.loss,
        metrics=last.metrics,
        to_goal_s=None if goal is None else next(_reached(history, spent, goal), None),
    )


def _reached(history: Sequence[EpochRecord], spent: Sequence[float], goal: float) -> Iterator[float]:
    """Yield the seconds after which the first metric, or else the loss, was at least as good as the goal."""
    for number, epoch in enumerate(history, start=1):
        found = epoch.validation or epoch.train
        name, value = next(iter(found.metrics.items()), ("loss", found.loss))
        if value >= goal if better_by_name(name) == "higher" else value <= goal:
            yield sum(spent[:number])


def cost_of(row: Row, price_per_hour: float | None) -> float | None:
    """Return the price of a row's hosts for its samples; None: there is no price."""
    if price_per_hour is None:
        return None
    return row.hosts * price_per_hour * row.seconds / row.goodput / 3600
