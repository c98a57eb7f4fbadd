"""Warnings before the first step of what a run will not give, or costs much."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from tutti.comm.base import Communicator
from tutti.optim.attribute_memory import THINGS, Thing, memory_of
from tutti.optim.attributes import OF_MODULES, is_recomputed
from tutti.run.build import Task, outputs_for
from tutti.strategies import Strategy

FLOAT: Final = 4
"""The bytes of an output."""

MUCH: Final = 1 << 30
"""The bytes of outputs from which on a metric that needs all of them gets a warning."""


def warn_if_short(strategy: Strategy, steps: int, comm: Communicator) -> None:
    """Warn of a run that ends before the workers have exchanged much.

    Args:
        strategy: how they train.
        steps: how many each of them makes.
        comm: the workers.
    """
    if comm.rank == 0 and comm.size > 1 and 1 < strategy.period >= steps:
        print(
            f"tutti: warning: each worker makes {steps} steps, and with strategy '{strategy.name}' they "
            f"exchange something after every {strategy.period}, so they learn next to nothing from each "
            "other; train longer, or have them exchange more often",
            file=sys.stderr,
            flush=True,
        )


def warn_if_shown(module: nn.Module, comm: Communicator) -> None:
    """Warn of plain attributes that lie in the memory of trained weights, which get other memory.

    Args:
        module: the model, before its weights do.
        comm: all ranks.
    """
    if comm.rank > 0:
        return
    weights = memory_of(one for one in module.parameters() if one.requires_grad)
    known = {id(one) for one in (*module.modules(), *module.parameters())}
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            kept = attribute in OF_MODULES or is_recomputed(owner, attribute)
            if not kept and any(map(weights.around, _things_in(value, set(known)))):
                path = f"{name}.{attribute}" if name else attribute
                print(
                    f"tutti: warning: the attribute '{path}' of the model shows a weight, and will go on "
                    "showing what that was before training; take it from the weight in forward()",
                    file=sys.stderr,
                    flush=True,
                )


def _things_in(value: Any, known: set[int]) -> Iterator[Thing]:
    """Yield the tensors and arrays of an attribute, but for those that are `known`, by their identity."""
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, THINGS):
        yield value
    elif isinstance(value, dict | list | tuple | deque | nn.Module):
        inner = value.values() if isinstance(value, dict) else value
        for one in inner.parameters() if isinstance(inner, nn.Module) else inner:
            yield from _things_in(one, known)


def warn_if_much(task: Task, comm: Communicator) -> None:
    """Warn of metrics that need more outputs at once than may be expected to fit into memory.

    Args:
        task: what is learned.
        comm: the workers.
    """
    names = [metric.name for metric in task.objective.metrics if metric.gathers]
    largest = max(task.dataset.parts, key=len)
    nbytes = len(largest) * (outputs_for(task.dataset) * FLOAT + largest.targets[:1].nbytes)
    if comm.rank == 0 and names and nbytes > MUCH:
        print(
            f"tutti: warning: for {', '.join(names)} all outputs of a part are brought together, which takes "
            f"about {nbytes / 1e9:.1f} GB on rank 0 after every epoch; accuracy, f1 or calibration_error are "
            "counted as the samples come",
            file=sys.stderr,
            flush=True,
        )
