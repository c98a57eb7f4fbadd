"""The replay of workers that never wait for each other, and of their servers, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy

from tutti.studies.simulate.cluster import HostLayout
from tutti.studies.simulate.pattern import StepSequence
from tutti.studies.simulate.ports import send
from tutti.studies.simulate.recorder import CommOperation
from tutti.studies.simulate.step_times import Floats

POST: Final = 0
"""The first stage of an event: a worker sends a message to a server. In the third stage it is served."""
HEADER: Final = 1
"""The second stage: the header of the message arrives at the server."""


@dataclass
class ServerRequest:
    """A worker's request to all servers, in bytes for each server.

    Attributes:
        header: the first part of each message.
        sent: each message.
        answers: each answer; 0: the worker does not wait for one.
        parts: the number of messages to each server.
        answer_parts: the number of messages back.
    """

    header: float
    sent: list[float]
    answers: list[float]
    parts: int = 0
    answer_parts: int = 0

    @property
    def pushes(self) -> bool:
        """True if the request moves the centre."""
        return self.parts > 1


def requests_of(operations: Iterable[CommOperation], servers: int) -> list[ServerRequest]:
    """Return the requests in a worker's messages to and from its servers."""
    found: list[ServerRequest] = []
    answered = True
    for one in operations:
        if one.kind == "send":
            if answered:
                found.append(ServerRequest(one.nbytes, [0.0] * servers, [0.0] * servers))
                answered = False
            found[-1].sent[one.peer] += one.nbytes
            found[-1].parts += one.peer == 0
        else:
            found[-1].answers[one.peer] += one.nbytes
            found[-1].answer_parts += one.peer == 0
            answered = True
    return found


def replay_free(steps: StepSequence, cluster: HostLayout, work: Floats, servers: int) -> tuple[Floats, float]:
    """Return the time at which each worker ends, and the mean staleness of its requests.

    A server serves requests one after the other, in the order of their arrival:

        worker   │ computes │ header, message ──▶ │       waits        │ computes
        server              │     others      ──▶ │ answer ──▶
                            post        header arrives    server is free, message is there

    Args:
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each worker computes in each step, of shape (steps, ranks).
        servers: the number of servers.
    """
    requests: list[ServerRequest] = []
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
        self,
        cluster: HostLayout,
        servers: int,
        requests: Sequence[ServerRequest],
        waits: Sequence[Sequence[float]],
    ) -> None:
        self._requests, self._waits, self._servers, self._ranks = requests, waits, servers, cluster.ranks
        every = [(rank, cluster.ranks + server) for rank in range(cluster.ranks) for server in range(servers)]
        self._there = [cluster.way(*pair) for pair in every]
        self._back = [cluster.way(*reversed(pair)) for pair in every]
        self._slowest = [max(hop.s_per_byte for hop in way) for way in self._there]
        self._overhead_s = [cluster.overhead_s(*pair) for pair in every]

    def run(self) -> tuple[Floats, float]:
        servers, stages, requests, waits = self._servers, 3 * self._servers, self._requests, self._waits
        there, back, count = self._there, self._back, len(self._requests)
        slowest, overhead_s = self._slowest, self._overhead_s
        pushes = [request.pushes for request in requests]
        missing, resumed, ends = [0] * self._ranks, [0.0] * self._ranks, list(waits[0])
        # The version of the first server, and the version that each worker has seen.
        version, seen, behind, readings = 0, [0] * self._ranks, 0, 0
        busy, queues = [0.0] * servers, [deque[tuple[int, float]]() for _ in range(servers)]
        # The time, the number of worker, request, server and stage, and the arrival of the whole message.
        events = [(at, rank * count * stages, 0.0) for rank, at in enumerate(ends) if count]
        heapify(events)
        while events:
            now, number, arrival = heappop(events)
            at = now
            rank, rest = divmod(number, count * stages)
            made, rest = divmod(rest, stages)
            server, stage = divmod(rest, 3)
            request, pair = requests[made], rank * servers + server
            if stage == POST:
                if not server:
                    missing[rank] = 1 + (servers if request.answers[0] else 0)
                nbytes = request.sent[server]
                at, arrival = send(there[pair], nbytes, at + request.parts * overhead_s[pair], at)
                header_s = arrival - (nbytes - request.header) * slowest[pair]
                heappush(events, (header_s, number + HEADER, arrival))
                if server + 1 < servers:
                    heappush(events, (at, number + 3, 0.0))
                    continue
            else:
                if stage == HEADER:
                    # The server takes the header while the message is still coming.
                    at = max(busy[server] + overhead_s[pair], arrival)
                    if servers > 1:  # others may take the ports until then
                        queues[server].append((number + 1, arrival))
                        if len(queues[server]) == 1:
                            heappush(events, (at, number + 1, arrival))
                        continue
                if not server and pushes[made]:
                    version += 1
                    seen[rank] += 1
                if request.answers[server]:
                    at += (request.parts - 1 + request.answer_parts) * overhead_s[pair]
                    at, arrival = send(back[pair], request.answers[server], at, now)
                    arrival += (request.answer_parts - 1) * overhead_s[pair]
                    if not server:
                        behind, readings = behind + version - seen[rank], readings + 1
                        seen[rank] = version
                busy[server] = at
                if servers > 1:
                    queue = queues[server]
                    queue.popleft()
                    if queue:
                        heappush(events, (max(at, queue[0][1]), *queue[0]))
                if not request.answers[server]:
                    continue
                at = arrival
            if at > resumed[rank]:
                resumed[rank] = at
            missing[rank] -= 1
            if not missing[rank]:
                ends[rank] = resumed[rank] + waits[made + 1][rank]
                if made + 1 < count:
                    heappush(events, (ends[rank], number - rest + stages, 0.0))
        return numpy.array(ends), behind / readings if readings else 0.0
