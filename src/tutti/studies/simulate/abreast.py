"""The replay of workers that make their k-th step together: all at once, in vectors over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy
from numpy.typing import NDArray

from tutti.studies.simulate.cluster import Cluster
from tutti.studies.simulate.pattern import Steps
from tutti.studies.simulate.peers import Partners, partners
from tutti.studies.simulate.recorder import Operation
from tutti.studies.simulate.step_times import Floats
from tutti.strategies import Strategy

Ints = NDArray[numpy.int64]

KEPT: Final = 32
"""The partners whose messages' ways are kept."""


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


class _Stretch(NamedTuple):
    """The n-th hops of messages: the numbers of the messages, and of each its port and the port's figures.

    `alone`: no two messages have a port in common.
    """

    messages: Ints
    port: Ints
    s_per_byte: Floats
    latency_s: Floats
    alone: bool


class Ports:
    """The ports of a cluster; of each its last busy period is known."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begin = self._free = numpy.zeros(0)
        self._ways: dict[int, tuple[Partners, tuple[Floats, list[_Stretch]]]] = {}

    def exchange(self, clocks: Floats, of_all: Partners, nbytes: float) -> Floats:
        """Return the clocks after each rank has sent to its partner, and has what its source sends."""
        senders = numpy.flatnonzero(of_all.to >= 0)
        overhead_s, stretches = self._way(of_all, senders)
        head = clocks[senders] + overhead_s
        done = head
        tail, slowest = numpy.zeros((2, len(senders)))
        for number, stretch in enumerate(stretches):
            on = stretch.messages
            seconds = nbytes * stretch.s_per_byte
            end = self._carry(stretch, head[on], seconds)
            done = end if number == 0 else done
            # The last byte leaves a fast port no sooner than it comes there from a slow one.
            tail[on] = (
                numpy.where(seconds >= slowest[on], end, numpy.maximum(end, tail[on])) + stretch.latency_s
            )
            slowest[on] = numpy.maximum(slowest[on], seconds)
            head[on] = end - seconds + stretch.latency_s
        arrival = numpy.zeros(len(clocks))
        arrival[of_all.to[senders]] = tail + overhead_s
        after = clocks.copy()
        after[senders] = numpy.maximum(done, arrival[senders])
        return after

    def _way(self, of_all: Partners, senders: Ints) -> tuple[Floats, list[_Stretch]]:
        """Return the overhead and the hops of all messages, kept for partners that come again."""
        if id(of_all) in self._ways:
            return self._ways[id(of_all)][1]
        pairs = [*zip(senders.tolist(), of_all.to[senders].tolist(), strict=True)]
        ways = [self._cluster.way(*pair) for pair in pairs]
        overhead_s = numpy.array([self._cluster.overhead_s(*pair) for pair in pairs])
        found = []
        for number in range(max(map(len, ways), default=0)):
            on = [index for index, way in enumerate(ways) if number < len(way)]
            port, s_per_byte, latency_s = map(
                numpy.array, zip(*(ways[index][number] for index in on), strict=True)
            )
            alone = len(numpy.unique(port)) == len(port)
            found.append(_Stretch(numpy.array(on), port, s_per_byte, latency_s, alone))
        more = numpy.zeros(self._cluster.ports - len(self._free))
        self._begin, self._free = (numpy.concatenate([old, more]) for old in (self._begin, self._free))
        if len(self._ways) == KEPT:
            self._ways.clear()
        self._ways[id(of_all)] = of_all, (overhead_s, found)
        return overhead_s, found

    def _carry(self, stretch: _Stretch, at: Floats, seconds: Floats) -> Floats:
        """Carry messages, each port in the order in which they come; returns when each is done.

        A message from a round before may come first and be entered later: it is not delayed by a later one.
        """
        port = stretch.port
        if not stretch.alone:
            order = numpy.lexsort((at, port))
            port, at, seconds = port[order], at[order], seconds[order]
        late = at + seconds > self._begin[port]
        begin = numpy.where(late, numpy.maximum(at, self._free[port]), at)
        if stretch.alone:
            done = begin + seconds
            last = done > self._free[port]
        else:
            # done_i = max(begin_i, done_(i-1)) + seconds_i
            #        = total_i + max over j <= i of (begin_j - total_(j-1))       on one port
            total = numpy.cumsum(seconds)
            slack = begin - (total - seconds)
            # Each port lies above the one before, so that its maximum begins there.
            lift = numpy.cumsum(numpy.diff(port, prepend=port[0]) > 0) * (numpy.ptp(slack) + 1.0)
            done = total + numpy.maximum.accumulate(slack + lift) - lift
            last = (numpy.diff(port, append=-1) != 0) & (done > self._free[port])
        self._begin[port[last]] = (done - seconds)[last]
        self._free[port[last]] = done[last]
        if stretch.alone:
            return done
        result = numpy.empty_like(done)
        result[order] = done
        return result
