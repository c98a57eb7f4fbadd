"""The choice of strategy, local steps and batch size for some hosts: the least loss in the same time.

All candidates train for the same simulated time. A candidate that sends less makes more steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.run.build import seeded
from tutti.run.config import TrainConfig
from tutti.run.jobs import load_job
from tutti.studies.simulate.calibrate import measured_steps
from tutti.studies.simulate.question import REPLAYED, AdviseJob, Way
from tutti.studies.simulate.result import SimulatedRow, Simulation
from tutti.studies.simulate.work import OVERHEAD, PlannedRow, opened, plan_rows, simulated

EVERY: Final = (8, 32, 128)
"""Local steps between two exchanges, to choose from."""

EXCHANGES: Final = 4
"""The fewest exchanges of a short training: fewer say nothing about local steps."""

MARGIN: Final = 1.5
"""What a proposed budget has more than is needed, as the next timing may be slower."""

LEAST: Final = 40
"""The fewest steps of a short training, for a worker that never waits."""


@dataclass(frozen=True)
class Advice:
    """The recommended candidate."""

    simulation: Simulation  # of all candidates
    pick: SimulatedRow
    config: TrainConfig  # of the pick

    def why(self) -> str:
        """Return the reason for the pick, in a sentence."""
        first, pick = self.simulation.rows[0], self.pick
        more = f"{pick.rate / first.rate:.2g} times the samples per second of {first.way}"
        return (
            f"{pick.way} has the least loss after {pick.seconds:.3g} simulated seconds: {pick.loss:.4g}; "
            f"{first.way} has {first.loss:.4g}. It makes {more}."
        )


def work(comm: Communicator, payload: bytes) -> Advice:
    """Train all candidates for the same simulated time, and pick one (entry point).

    Raises:
        BadOption: the budget is too short.
    """
    job = load_job(payload, AdviseJob)
    # The given length is that of the training afterwards.
    job = replace(job, config=replace(job.config, epochs=None, steps=None))
    (workers,) = job.question.workers
    with seeded(job.config.seed):
        task = opened(job, comm)
        speaks = comm.rank == 0 and not job.quiet
        if speaks:
            print(f"timing a step of {job.config.batch_size:,} samples", flush=True)
        pass_s = measured_steps(job, comm, task, job.config.batch_size).median
        each_s = OVERHEAD * pass_s * workers / comm.size
        steps = max(LEAST, int(job.budget_s / (each_s * len([*_candidates(job, 1 << 30)]))))
        needed_s = steps * each_s * len([*_candidates(job, steps)])
        if needed_s > job.budget_s:
            raise BadOption(
                f"--budget {job.budget_s:g} has no room for {LEAST} steps of {workers} virtual workers, "
                f"which fill the hosts; give "
                f"--budget {ceil(MARGIN * needed_s)}, or fewer --hosts"
            )
        question = replace(job.question, ways=[*_candidates(job, steps)])
        if speaks:
            print(
                f"timing {len(question.ways)} candidates, then training each for {steps:,} steps or more",
                flush=True,
            )
        timing = replace(job, question=replace(question, timing=True))
        timed = simulated(timing, comm, task, plan_rows(timing)).rows
        own_step_s = [row.seconds / REPLAYED for row in timed]
        ways = [
            replace(way, options={**way.options, "steps": max(1, int(steps * min(own_step_s) / own_s))})
            for way, own_s in zip(question.ways, own_step_s, strict=True)
        ]
        learning = replace(job, question=replace(question, ways=ways))
        plans = plan_rows(learning)
        found = simulated(learning, comm, task, plans, job.budget_s)
    losses = {row.way: row.loss for row in found.rows if row.loss is not None}
    pick = min((row for row in found.rows if row.way in losses), key=lambda row: losses[row.way])
    configs = {one.row.way: one.recipe.config for one in plans if isinstance(one, PlannedRow)}
    return Advice(found, pick, configs[pick.way])


def _candidates(job: AdviseJob, steps: int) -> Iterator[Way]:
    own = job.config.batch_size
    for size in job.batch_sizes or (own, 2 * own):
        yield Way(f"sync:batch_size={size}", "sync", {"batch_size": size})
    for every in EVERY:
        if every * EXCHANGES <= steps:
            local = {"strategy.every": every}
            yield Way(f"local:every={every}", "local", local)
            yield Way(f"diloco:every={every}", "diloco", {**local, "strategy.outer_momentum": 0.5})
            yield Way(f"sparseloco:every={every}", "sparseloco", local)
