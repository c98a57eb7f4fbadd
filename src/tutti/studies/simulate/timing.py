"""The time of a training, by a replay of its communication without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy

from tutti.comm.network import Network
from tutti.studies.simulate.abreast import replay_abreast
from tutti.studies.simulate.cluster import HostLayout
from tutti.studies.simulate.failures import Failures, goodput
from tutti.studies.simulate.free import replay_free
from tutti.studies.simulate.pattern import CommPattern
from tutti.studies.simulate.peers import replay_peers
from tutti.studies.simulate.step_times import Floats, StepTimes


@dataclass(frozen=True)
class Replayed:
    """Measurements of a replay.

    Attributes:
        seconds: until the last worker has made its steps.
        steps_per_s: steps of one worker per second, in the mean over the workers.
        bytes_per_worker_step: bytes that a worker sends in a step, as its strategy counts them.
        utilisation: the share of the workers' time, until the last one ends, in which they compute.
        goodput: the share of useful steps; 1 without failures.
        staleness: the mean number of updates by others between the weights of a gradient and its use; 0 if
            workers wait for each other.
    """

    seconds: float
    steps_per_s: float
    bytes_per_worker_step: float
    utilisation: float
    goodput: float
    staleness: float


def replay(
    pattern: CommPattern,
    hosts: Sequence[int],
    network: Network,
    times: StepTimes,
    steps: int,
    *,
    speeds: Sequence[float] = (),
    input_batches_per_s: float = inf,
    failures: Failures | None = None,
    seed: int = 0,
) -> Replayed:
    """Replay the steps of all workers. The result has the same bits in every run.

    Args:
        pattern: the communication of a worker.
        hosts: the number of ranks on each host.
        network: the cost of communication.
        times: the distribution of a forward and backward pass; each pass of each worker draws a time.
        steps: the number of steps of each worker.
        speeds: the speed of each host relative to `times`; by default 1.
        input_batches_per_s: the most batches per second of a worker's input.
        failures: of the hosts; None: there are none.
        seed: of the times.

    Raises:
        BadOption: the communication depends on data, or on the time of other workers.
        ValueError: a number is out of range, or there is not one speed for each host.
    """
    work = _work(pattern, hosts, times, steps, speeds, input_batches_per_s, seed)
    cluster = HostLayout(network, hosts)
    recorded = pattern.steps(hosts, steps)
    staleness = 0.0
    if pattern.servers:
        ends, staleness = replay_free(recorded, cluster, work, pattern.servers)
    elif any(one.kind == "exchange" for step in recorded.first for one in step.operations):
        ends = replay_peers(pattern.strategy, recorded, cluster, work)
    else:
        ends = replay_abreast(recorded, cluster, work)
    kept = 1.0
    if failures is not None:
        kept = goodput(failures, pattern.strategy.pace, len(hosts), pattern.servers)
    return Replayed(
        seconds=float(ends.max()),
        steps_per_s=float((steps / ends).mean()),
        bytes_per_worker_step=sum(recorded[step].bytes_sent for step in range(steps)) / steps,
        utilisation=min(1.0, float(work.mean(axis=1).sum() / ends.max())),
        goodput=kept,
        staleness=staleness,
    )


def _work(
    pattern: CommPattern,
    hosts: Sequence[int],
    times: StepTimes,
    steps: int,
    speeds: Sequence[float],
    input_batches_per_s: float,
    seed: int,
) -> Floats:
    """Return the seconds that each worker computes in each step, of shape (steps, ranks)."""
    if steps < 1 or not hosts or min(hosts) < 1:
        raise ValueError(f"{steps} steps on hosts of {list(hosts)} ranks; expected at least 1 of each")
    if speeds and (len(speeds) != len(hosts) or not min(speeds) > 0):
        raise ValueError(
            f"speeds are {list(speeds)}; expected {len(hosts)} numbers above 0, one for each host"
        )
    if not input_batches_per_s > 0:
        raise ValueError(f"input_batches_per_s is {input_batches_per_s}; expected more than 0")
    ranks, passes = sum(hosts), pattern.strategy.passes
    speed = numpy.repeat(numpy.array(speeds or [1.0] * len(hosts)), hosts)
    generator = numpy.random.default_rng(seed)
    work = numpy.zeros((steps, ranks))
    for step in work:
        drawn = times.sample(generator, (passes, ranks)) / speed
        step[:] = numpy.maximum(drawn, 1 / input_batches_per_s).sum(axis=0)
    return work
