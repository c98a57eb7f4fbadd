"""The replay of workers that meet in collectives; vectors have a number for each rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy

from tutti.studies.simulate.cluster import HostLayout
from tutti.studies.simulate.pattern import StepSequence
from tutti.studies.simulate.recorder import CommOperation
from tutti.studies.simulate.step_times import Floats


def replay_abreast(steps: StepSequence, cluster: HostLayout, work: Floats) -> Floats:
    """Return the time at which each worker ends, in seconds.

    Args:
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each worker computes in each step, of shape (steps, ranks).
    """
    clocks = numpy.zeros(cluster.ranks)
    meetings: dict[CommOperation, Callable[[Floats], None]] = {}
    for number, seconds in enumerate(work):
        clocks += seconds
        for operation in steps[number].operations:
            if operation not in meetings:
                meetings[operation] = _meeting(operation, cluster)
            meetings[operation](clocks)
    return clocks


def _meeting(operation: CommOperation, cluster: HostLayout) -> Callable[[Floats], None]:
    """Return a function that moves the clocks of each group to the latest one + the collective's seconds."""
    if operation.group == "host":
        of_hosts = numpy.array([cluster.seconds(operation, (size,)) for size in cluster.sizes])

        def hosts_meet(clocks: Floats) -> None:
            clocks[:] = (numpy.maximum.reduceat(clocks, cluster.starts) + of_hosts)[cluster.host_of]

        return hosts_meet
    whole = operation.group == "all"
    seconds = cluster.seconds(operation, cluster.sizes if whole else (1,) * len(cluster.sizes))
    # A column for each group of ranks; the last ranks of a large host may be in none.
    first = numpy.arange(cluster.ranks) if whole else cluster.starts
    ranks = first[:, None] + numpy.arange(1 if whole else min(cluster.sizes))

    def columns_meet(clocks: Floats) -> None:
        clocks[ranks] = clocks[ranks].max(axis=0) + seconds

    return columns_meet
