"""Servers among the ranks of a run: who they are, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch import nn

from tutti.comm.base import Communicator
from tutti.launch.placement import split_off_servers
from tutti.launch.stop_request import stoppable
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.optimization import build_optimizer
from tutti.strategies import Clip, Strategy
from tutti.strategies.base import Home
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place

R = TypeVar("R")


def take_sides(comm: Communicator, config: TrainConfig) -> Communicator:
    """The workers' communicator on a worker, the servers' on a server (collective over all ranks)."""
    return split_off_servers(comm, config.servers, config.levels, config.server_period)


def work_or_serve(
    job: Job, team: Communicator, module: nn.Module, strategy: Strategy, work: Callable[[], R]
) -> R | None:
    """Return the result of a worker's `work`; None on a server, which serves until the workers are done."""
    servers, config = team.servers, job.config
    if servers is None or not servers.serving:
        return work()
    assert isinstance(strategy, Centred), "others are refused with servers"
    optimizer = build_optimizer(job, module)
    replica = place(module, team, Home.PRIVATE)
    # A request to stop may reach all ranks; the workers act on it.
    with stoppable():
        strategy.serve(servers, replica, optimizer, Clip(config.clip_norm, config.clip_value))
    return None


def result_for_all(comm: Communicator, team: Communicator, result: R | None) -> R:
    """Return the result of this rank: a worker's own, on a server rank 0's (collective over all ranks).

    To a program that mpirun started, all ranks are alike. And a server does not leave before the workers.
    """
    first = result if team is comm else comm.broadcast_object(result)
    return cast("R", first if result is None else result)
