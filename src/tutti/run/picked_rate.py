"""`--lr auto`: the learning rate that a range test on the run's own ranks picks. Runs on every rank."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from tutti.comm.base import Communicator
from tutti.run.build import Task
from tutti.run.jobs import Recipe
from tutti.run.optimization import own_rate
from tutti.run.restore import laid_out
from tutti.strategies import Solo, Sync
from tutti.training.module_state import load_random_state, random_state
from tutti.training.range_test import BELOW, RangeTest, losses_of, pick, rates_for


def pick_rate(recipe: Recipe, comm: Communicator, task: Task) -> RangeTest:
    """Make a range test of the run before it begins (collective).

    The test trains copies of model and loss with synchronous steps for every strategy, so that any number of
    ranks picks the same rate. The task and the random generators stay as they are.
    """
    config = replace(
        recipe.config,
        lr=BELOW * own_rate(recipe),
        schedule=None,
        schedule_options={},
        callbacks=None,
        balance="none",
        monitor=None,
        patience=None,
        goal=None,
        restore_best=False,
        average=None,
        cuda_graph="off",
    )
    objects = {name: one for name, one in recipe.objects.items() if name not in ("schedule", "callbacks")}
    recipe = replace(recipe, config=config, objects=objects)
    random, objective = random_state(), task.objective
    module, loss = copy.deepcopy((task.module, objective.loss))
    task = replace(task, module=module, objective=replace(objective, loss=loss, metrics=()))
    strategy = Solo() if comm.size == 1 else Sync()
    with laid_out(recipe, comm, task, strategy, None) as parts:
        updates, batches = parts.schedule.updates, parts.schedule.batches
        optimizer = parts.workers.optimizer
        rates = rates_for(updates, optimizer.param_groups[0]["lr"])
        losses = losses_of(parts.workers, parts.task.objective, batches, rates) if rates else []
        found = pick(rates, losses, updates, not isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD))
    load_random_state(random)
    return found
