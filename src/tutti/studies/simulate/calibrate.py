"""The time of a training step: measured here on all ranks at once, or estimated for another machine."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import date
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Final, cast

from torch.utils.flop_counter import FlopCounterMode

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.model_parallel.base import Whole
from tutti.run.build import Task, assemble
from tutti.run.jobs import Recipe
from tutti.strategies import Solo
from tutti.studies.simulate.machine import Machine
from tutti.studies.simulate.step_times import StepTimes
from tutti.training.run_parts import Hooks, Schedule
from tutti.training.trainer import Trainer

MEASURED_S: Final = 1.5
"""The seconds of timing."""

FIRST, LEAST, MOST = 5, 20, 2000
"""First steps that do not count, as they allocate memory, and the least and most steps that count."""

PASSES: Final = 3
"""A step has three times the operations of a forward pass: a backward pass has twice as many."""


def measured_steps(recipe: Recipe, comm: Communicator, task: Task, batch_size: int) -> StepTimes:
    """Return the seconds of a training step of `batch_size` samples, on all ranks at once (collective).

    A step is that of the training loop: batch, forward, backward, metrics and the optimizer's update.
    """
    alone = comm.split(comm.rank)
    assert alone is not None, "every rank has a color"
    own, strategy = replace(task, module=copy.deepcopy(task.module)), Solo()
    config = replace(
        recipe.config, batch_size=batch_size, schedule=None, schedule_options={}, epochs=None, steps=MOST
    )
    parts = assemble(replace(recipe, config=config), alone, own, strategy, Whole(own.module, alone, strategy))
    for group in parts.workers.optimizer.param_groups:
        group["lr"] = 0.0  # No number of steps can make the model diverge.

    def times(steps: int) -> list[float]:
        begins: list[float] = []
        schedule = Schedule(parts.schedule.batches, steps=steps + FIRST)
        hooks = Hooks(on_step=lambda _: begins.append(perf_counter()))
        comm.barrier()
        Trainer(parts.workers, parts.task.objective, schedule, hooks=hooks).fit()
        return [end - begin for begin, end in pairwise(begins)][FIRST - 1 :]

    mine = times(LEAST)
    steps = int(MEASURED_S / median(cast("list[float]", comm.broadcast_object(mine))))
    if steps > LEAST:
        mine = times(min(MOST, steps))
    alone.close()
    every = cast("list[list[float]]", comm.all_gather_objects(mine))
    return StepTimes.measured([seconds for found in every for seconds in found])


def flops_of_sample(task: Task) -> float:
    """Return the floating-point operations of a forward and backward pass of one sample.

    Raises:
        BadOption: torch's counter knows no operation of the model.
    """
    inputs, targets = task.workload(1).batch(1)
    module = copy.deepcopy(task.module).eval()  # BatchNorm needs several samples in training.
    with FlopCounterMode(display=False) as counter:
        task.objective.compute(module, inputs, targets)
    flops = PASSES * counter.get_total_flops()
    if not flops:
        raise BadOption(
            "torch counts no operations of this model, so its time on another machine is unknown; leave "
            "flops_per_s out of the machine's file to time it here"
        )
    return float(flops)


def estimated_steps(machine: Machine, task: Task, batch_size: int) -> StepTimes:
    """Return the seconds of a step of `batch_size` samples, by the machine's operations per second."""
    assert machine.flops_per_s is not None
    usual = flops_of_sample(task) * batch_size / machine.flops_per_s
    return StepTimes(tuple(usual * one for one in machine.spread))


def calibrated(machine: Machine, task: Task, batch_size: int, times: StepTimes) -> Machine:
    """Return the machine with the speed and spread of measured steps."""
    rate = flops_of_sample(task) * batch_size / times.median
    spread = tuple(float(f"{one / times.median:.4g}") for one in times.quantiles_s)
    source = f"{task.name}, timed on {date.today()}"
    return replace(machine, source=source, flops_per_s=float(f"{rate:.6g}"), spread=spread)
