"""Warnings before the first step of what a run will not give, or costs much."""

from __future__ import annotations

import sys
from typing import Final

from tutti.comm.base import Communicator
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
