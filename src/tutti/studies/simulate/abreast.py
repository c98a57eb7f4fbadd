"""The replay of workers that make their k-th step together: all of them at once, in vectors over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from numpy.typing import NDArray

from tutti.studies.simulate.cluster import Cluster
from tutti.studies.simulate.pattern import Steps
from tutti.studies.simulate.peers import Partners, partners
from tutti.studies.simulate.recorder import Operation
from tutti.studies.simulate.step_times import Floats
from tutti.strategies import Strategy

Ints = NDArray[numpy.int64]


def replay_abreast(strategy: Strategy, steps: Steps, cluster: Cluster, work: Floats) -> Floats:
    """Return the time at which each worker has made its steps, in seconds.

    Args:
        strategy: chooses the partners of exchanges.
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each computes in each step, of shape (steps, ranks).
    """
    clocks = numpy.zeros(cluster.ranks)
    meetings: dict[Operation, Callable[[Floats], None]] = {}
    ports, turn = Ports(cluster), 0
    for number, seconds in enumerate(work):
        clocks += seconds
        for operation in steps[number].operations:
            if operation.kind == "exchange":
                for of_all in partners(strategy, cluster.ranks, turn):
                    clocks = ports.exchange(clocks, of_all, operation.nbytes)
                turn += 1
                continue
            if operation not in meetings:
                meetings[operation] = _meeting(operation, cluster)
            meetings[operation](clocks)
    return clocks


def _meeting(operation: Operation, cluster: Cluster) -> Callable[[Floats], None]:
    """Return a function that lets the clocks of each group meet: the latest, and the seconds it takes."""
    if operation.group == "all":
        seconds = cluster.seconds(operation, cluster.sizes)

        def all_meet(clocks: Floats) -> None:
            clocks[:] = clocks.max() + seconds

        return all_meet
    if operation.group == "host":
        of_hosts = numpy.array([cluster.seconds(operation, (size,)) for size in cluster.sizes])

        def hosts_meet(clocks: Floats) -> None:
            clocks[:] = (numpy.maximum.reduceat(clocks, cluster.starts) + of_hosts)[cluster.host_of]

        return hosts_meet
    seconds = cluster.seconds(operation, (1,) * len(cluster.sizes))
    ranks = cluster.starts[:, None] + numpy.arange(cluster.lanes)

    def lanes_meet(clocks: Floats) -> None:
        clocks[ranks] = clocks[ranks].max(axis=0) + seconds

    return lanes_meet


class Ports:
    """The ports of a cluster; of each its last busy period is known."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begin = self._free = numpy.zeros(0)

    def exchange(self, clocks: Floats, of_all: Partners, nbytes: float) -> Floats:
        """Return the clocks after each rank has sent to its partner, and has what its source sends."""
        senders = numpy.flatnonzero(of_all.to >= 0)
        ways = [self._cluster.way(rank, int(of_all.to[rank])) for rank in senders]
        self._grow()
        at = head = clocks[senders]
        tail = done = at
        for number in range(max(map(len, ways), default=0)):
            on = numpy.array([index for index, way in enumerate(ways) if number < len(way)])
            port, s_per_byte, latency_s = numpy.array([ways[index][number] for index in on]).T
            seconds = nbytes * s_per_byte
            end = self._carry(port.astype(int), head[on], seconds)
            done = end if number == 0 else done
            tail, head = tail.copy(), head.copy()
            tail[on], head[on] = end + latency_s, end - seconds + latency_s
        arrival = numpy.zeros(len(clocks))
        arrival[of_all.to[senders]] = tail
        after = clocks.copy()
        after[senders] = numpy.maximum(done, arrival[senders])
        return after

    def _grow(self) -> None:
        more = numpy.zeros(self._cluster.ports - len(self._free))
        self._begin, self._free = (numpy.concatenate([old, more]) for old in (self._begin, self._free))

    def _carry(self, port: Ints, at: Floats, seconds: Floats) -> Floats:
        """Carry messages, each port in the order in which they come; returns when each is done.

        A message from a round before may come first and be entered later: it is not delayed by a later one.
        """
        order = numpy.lexsort((at, port))
        port, at, seconds = port[order], at[order], seconds[order]
        late = at + seconds > self._begin[port]
        begin = numpy.where(late, numpy.maximum(at, self._free[port]), at)
        # done_i = max(begin_i, done_(i-1)) + seconds_i = total_i + max over j <= i of (begin_j - total_(j-1))
        total = numpy.cumsum(seconds)
        slack = begin - (total - seconds)
        # Each port lies above the one before, so that its maximum begins there.
        lift = (numpy.cumsum(numpy.diff(port, prepend=port[:1]) > 0)) * (numpy.ptp(slack) + 1.0)
        done = total + numpy.maximum.accumulate(slack + lift) - lift
        last = numpy.diff(port, append=-1) != 0
        ports, ends, lengths = port[last], done[last], seconds[last]
        newer = ends > self._free[ports]
        self._begin[ports[newer]] = (ends - lengths)[newer]
        self._free[ports[newer]] = ends[newer]
        result = numpy.empty_like(done)
        result[order] = done
        return result
