"""The replay of workers that never wait for each other, and of the servers of their centre: event by event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy

from tutti.studies.simulate.cluster import Cluster, Hop
from tutti.studies.simulate.pattern import Steps
from tutti.studies.simulate.recorder import Operation
from tutti.studies.simulate.step_times import Floats


@dataclass
class Request:
    """A worker's request to all servers, in bytes for each of them.

    Attributes:
        header: the first part of each message.
        sent: each message.
        answers: each answer; 0: the worker does not wait for one.
        pushes: whether it brings something that moves the centre.
    """

    header: float = 0.0
    sent: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    pushes: bool = False


def requests_of(operations: Iterable[Operation], servers: int) -> list[Request]:
    """Return the requests in a worker's messages to its servers and from them."""
    found: list[Request] = []
    answered = True
    for one in operations:
        if one.kind == "send":
            if answered:
                found.append(Request(one.nbytes, [0.0] * servers, [0.0] * servers))
                answered = False
            found[-1].pushes |= found[-1].sent[one.peer] > 0
            found[-1].sent[one.peer] += one.nbytes
        else:
            found[-1].answers[one.peer] += one.nbytes
            answered = True
    return found


def replay_free(steps: Steps, cluster: Cluster, work: Floats, servers: int) -> tuple[Floats, float]:
    """Return the time at which each worker has made its steps, and the mean staleness of what they push.

    A server serves requests in the order in which they come, one after the other:

        worker   │ computes │ header, message ──▶ │       waits        │ computes
        server              │     others      ──▶ │ answer ──▶
                            post        header comes      server is free, message is there

    Args:
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each computes in each step, of shape (steps, ranks).
        servers: how many there are.
    """
    requests: list[Request] = []
    waits: list[Floats] = []  # seconds of computing before each request, and after the last one
    computed = numpy.zeros(cluster.ranks)
    for number, seconds in enumerate(work):
        computed += seconds
        for request in requests_of(steps[number].operations, servers):
            requests.append(request)
            waits.append(computed)
            computed = numpy.zeros(cluster.ranks)
    return _Replay(cluster, servers, requests, [one.tolist() for one in (*waits, computed)]).run()


class _Replay:
    def __init__(
        self, cluster: Cluster, servers: int, requests: Sequence[Request], waits: Sequence[Sequence[float]]
    ) -> None:
        self._requests, self._waits, self._servers, self._ranks = requests, waits, servers, cluster.ranks
        every = [(rank, cluster.ranks + server) for rank in range(cluster.ranks) for server in range(servers)]
        self._there = [cluster.way(*pair) for pair in every]
        self._back = [cluster.way(*reversed(pair)) for pair in every]
        self._begin, self._free = [0.0] * cluster.ports, [0.0] * cluster.ports

    def _send(self, way: tuple[Hop, ...], nbytes: float, at: float) -> tuple[float, float]:
        """Send bytes; returns when the sender is done, and when the last byte arrives."""
        begin, free = self._begin, self._free
        done = end = -1.0
        for port, s_per_byte, latency_s in way:
            seconds = nbytes * s_per_byte
            # What comes before the last busy period is not delayed by it.
            if at + seconds > begin[port]:
                if at > free[port]:
                    begin[port] = at
                else:
                    at = free[port]
                end = free[port] = at + seconds
            else:
                end = at + seconds
            if done < 0:
                done = end
            at += latency_s
            end += latency_s
        return done, end

    def run(self) -> tuple[Floats, float]:
        servers, legs, requests, waits = self._servers, self._servers + 1, self._requests, self._waits
        there, back, send, count = self._there, self._back, self._send, len(self._requests)
        missing, resumed, ends = [0] * self._ranks, [0.0] * self._ranks, list(waits[0])
        # Of the first server: its version, and the one that each worker has seen.
        version, seen, behind, readings = 0, [0] * self._ranks, 0, 0
        busy = [0.0] * servers
        # A time, the number of worker, request and leg, and when the whole message is there. Leg 0 is the post
        # of a request, a further leg the coming of its header to a server.
        events = [(at, rank * count * legs, 0.0) for rank, at in enumerate(ends) if count]
        heapify(events)
        while events:
            at, number, arrival = heappop(events)
            rank, rest = divmod(number, count * legs)
            made, leg = divmod(rest, legs)
            request = requests[made]
            if not leg:
                for server, nbytes in enumerate(request.sent):
                    way = there[rank * servers + server]
                    at, arrival = send(way, nbytes, at)
                    body_s = (nbytes - request.header) * way[-1].s_per_byte
                    heappush(events, (arrival - body_s, number + 1 + server, arrival))
                resumed[rank] = at
                missing[rank] = servers if request.answers[0] else 0
            else:
                server = leg - 1
                if busy[server] < arrival:
                    busy[server] = arrival
                if not server and request.pushes:
                    version += 1
                    seen[rank] += 1
                if not request.answers[server]:
                    continue
                busy[server], arrival = send(back[rank * servers + server], request.answers[server], busy[server])
                if arrival > resumed[rank]:
                    resumed[rank] = arrival
                if not server:
                    behind, readings = behind + version - seen[rank], readings + 1
                    seen[rank] = version
                missing[rank] -= 1
            if not missing[rank]:
                ends[rank] = resumed[rank] + waits[made + 1][rank]
                if made + 1 < count:
                    heappush(events, (ends[rank], number - leg + legs, 0.0))
        return numpy.array(ends), behind / readings if readings else 0.0
