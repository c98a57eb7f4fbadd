"""Short trainings from the initial weights, with the real learning rate, in two precisions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.data import Part
from tutti.errors import NotFinite, UserError
from tutti.model_parallel.base import Whole
from tutti.run.build import Task, assemble, build_strategy, reseed
from tutti.run.jobs import Recipe
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.twins import ORDERS, REMEDY, Twins
from tutti.training.evaluation import evaluate
from tutti.training.precision import Arithmetic
from tutti.training.trainer import Trainer

PROBED_BATCHES: Final = 4
"""The loss is measured on the samples of this many batches ..."""

PROBED_LEAST: Final = 128
"""... and on at least this many samples."""


def short_trainings(
    recipe: Recipe,
    comm: Communicator,
    task: Task,
    pair: tuple[Candidate, Candidate],
    updates: int,
    is_late: Callable[[], bool] = lambda: False,
) -> Twins:
    """Train twins: the pair from the same weights with the same batches, in several orders of the batches.

    A schedule of the learning rate runs in full within these updates, so its largest rate is seen. The task's
    weights do not change.
    """
    size = pair[0].batch_size
    probe = some_of(task.dataset.validation or task.dataset.train, max(PROBED_LEAST, PROBED_BATCHES * size))
    losses: tuple[list[float], list[float]] = ([], [])
    precision, before = pair[1].precision, math.nan
    problem = ""
    for order, (way, measured) in product(range(ORDERS), zip(pair, losses, strict=True)):
        if is_late():
            problem = f"no time was left for all short trainings: {REMEDY}"
            break
        try:
            before, after = train_shortly(recipe, comm, task, way, updates, order, probe)
        except NotFinite:
            after = math.nan
        except UserError as error:
            problem = f"a short training cannot be made: {error}"
            break
        if not math.isfinite(after):
            problem = f"its loss is not finite in {way.precision}"
            break
        measured.append(after)
    if problem:
        return Twins(precision, updates, problem=problem)
    return Twins(precision, updates, before, tuple(losses[0]), tuple(losses[1]))


def train_shortly(
    recipe: Recipe, comm: Communicator, task: Task, way: Candidate, updates: int, order: int, probe: Part
) -> tuple[float, float]:
    """Train a copy of the task's model; return its loss on the probe samples before and after."""
    config = replace(
        way.applied_to(recipe.config),
        seed=recipe.config.seed + order,
        epochs=None,
        steps=updates,
        monitor=None,
        patience=None,
        goal=None,
        restore_best=False,
    )
    arithmetic = Arithmetic(way.precision, way.layout, config.device)
    module = arithmetic.prepare(copy.deepcopy(task.module))
    task = replace(task, objective=replace(task.objective, arithmetic=arithmetic, metrics=()))
    with_learned_offset(module, task)
    strategy = build_strategy(recipe, 1)
    parts = assemble(replace(recipe, config=config), comm, task, strategy, Whole(module, comm, strategy))
    reseed(config.seed, 0)
    before = evaluate(module, probe, comm, task.objective).here().loss
    module.train()
    Trainer(parts.workers, parts.task.objective, parts.schedule).fit()
    return before, evaluate(module, probe, comm, task.objective).here().loss


def with_learned_offset(module: nn.Module, task: Task) -> None:
    """Add the mean of the targets to the model's outputs, for regression.

    A model of targets 1000 +- 1 spends most of its training on the way to 1000, where all precisions are
    alike. Only near 1000 does bf16, with 8 bits, fail to tell 1000 from 1001. A last layer whose bias has
    learned the mean rounds its outputs in the same way.
    """
    if not task.objective.loss.amounts:
        return
    mean = task.dataset.train.targets.to(torch.float64).mean(dim=0)

    def shifted(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            return outputs
        return outputs + mean.to(outputs)

    module.register_forward_hook(shifted)


def some_of(part: Part, count: int) -> Part:
    """Return some samples of a part, the same ones each time."""
    drawn = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:count].to(part.device)
    return replace(part, rows=drawn if part.rows is None else part.rows.index_select(0, drawn))
