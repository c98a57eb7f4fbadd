"""Training on virtual workers: real gradients and messages, under a virtual clock."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.run import EpochRecord
from tutti.run.build import Task, reseed
from tutti.run.jobs import Recipe
from tutti.run.optimization import build_optimizer
from tutti.run.restore import laid_out
from tutti.strategies import Clip, Strategy, place
from tutti.strategies.base import WeightPlacement
from tutti.strategies.centred import Centred
from tutti.studies.simulate.machine import Machine
from tutti.studies.simulate.step_times import StepTimes


def learn(
    recipe: Recipe,
    task: Task,
    strategy: Strategy,
    machine: Machine,
    workers: int,  # their number; they fill the hosts in turn
    batch: int,  # samples of a worker's step
    times: StepTimes,  # of a worker's step
) -> list[EpochRecord]:
    """Train a copy of the task's model on virtual workers; return the epochs by the virtual clock."""
    config = recipe.config

    def program(comm: Communicator) -> list[EpochRecord] | None:
        reseed(config.seed, 1 + comm.rank)
        own = replace(task, module=copy.deepcopy(task.module))
        if comm.servers is not None and comm.servers.serving:
            assert isinstance(strategy, Centred), "others are refused with servers"
            replica = place(own.module, comm, WeightPlacement.PRIVATE)
            clip = Clip(config.clip_norm, config.clip_value)
            strategy.serve(comm.servers, replica, build_optimizer(recipe, own.module), clip)
            return None
        generator = numpy.random.default_rng((config.seed, comm.rank))
        speed = machine.speeds[comm.rank // machine.ranks_per_host % len(machine.speeds)]

        def seconds(samples: int) -> float:
            drawn = float(times.sample(generator, 1)[0])
            return max(drawn * samples / batch / speed, samples / machine.samples_per_s)

        with laid_out(recipe, comm, own, strategy, None) as parts:
            workers = replace(parts.workers, seconds_per_sample=seconds)
            return replace(parts, workers=workers).trainer().fit()

    world = VirtualWorld(workers, machine.ranks_per_host, machine.network, servers=config.servers)
    history = world.run(program)[0]
    assert history is not None, "worker 0 trains"
    return history
