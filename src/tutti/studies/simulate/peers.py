"""The replay of workers that exchange with some others in each round, event by event."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy

from tutti.strategies import Gossip, NoLoCo, Strategy
from tutti.strategies.gossip import links
from tutti.strategies.noloco import order_of_pairs
from tutti.studies.simulate.cluster import HostLayout
from tutti.studies.simulate.pattern import StepSequence
from tutti.studies.simulate.ports import Ports
from tutti.studies.simulate.step_times import Floats


def partners(strategy: Strategy, size: int, turn: int) -> tuple[list[int], ...]:
    """Return the rank that each rank sends to in each exchange of a round; -1: it rests.

    Args:
        strategy: of `WITH_PEERS`.
        size: the number of workers.
        turn: the number of rounds before this one.
    """
    if isinstance(strategy, NoLoCo):
        order = order_of_pairs(size, turn + 1, strategy.seed)
        other = [-1] * size
        for one, two in zip(order[0::2], order[1::2], strict=False):
            other[one], other[two] = two, one
        return (other,)
    assert isinstance(strategy, Gossip)
    return _linked(strategy.graph, size, turn if strategy.graph == "shift_one" else 0)


@lru_cache(maxsize=16)
def _linked(graph: str, size: int, turn: int) -> tuple[list[int], ...]:
    found = [links(graph, rank, size, turn) for rank in range(size)]
    most = max(map(len, found))
    return tuple([of[number][0] if number < len(of) else -1 for of in found] for number in range(most))


def replay_peers(strategy: Strategy, steps: StepSequence, cluster: HostLayout, work: Floats) -> Floats:
    """Return the time at which each worker has made its steps, in seconds.

    A worker goes on when it has sent its vector and has the one that is for it:

        worker 0   │ computes │ sends ──▶ 1        │ computes
        worker 1   │ computes    │ sends ──▶ 0, has 0's │ computes

    Args:
        strategy: chooses the partners.
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each computes in each step, of shape (steps, ranks).
    """
    exchanges: list[tuple[list[int], float]] = []
    waits: list[list[float]] = []  # seconds of computing before each exchange, and after the last one
    at_once = [0.0] * cluster.ranks
    computed, turn = numpy.zeros(cluster.ranks), 0
    for number, seconds in enumerate(work):
        computed += seconds
        for operation in steps[number].operations:
            for index, to in enumerate(partners(strategy, cluster.ranks, turn)):
                exchanges.append((to, operation.nbytes))
                waits.append(at_once if index else computed.tolist())
            computed, turn = numpy.zeros(cluster.ranks), turn + 1
    waits.append(computed.tolist())
    return numpy.array(_run(exchanges, waits, cluster))


def _run(
    exchanges: list[tuple[list[int], float]], waits: list[list[float]], cluster: HostLayout
) -> list[float]:
    way = lru_cache(maxsize=1 << 16)(lambda *pair: (cluster.way(*pair), cluster.overhead_s(*pair)))
    count, ends, ports = len(exchanges), list(waits[0]), Ports()
    # By the number of a worker and an exchange: when it has sent its own vector, when another's has come.
    sent: dict[int, float] = {}
    came: dict[int, float] = {}
    events = [(at, rank * count) for rank, at in enumerate(ends) if count]
    heapify(events)
    while events:
        now, number = heappop(events)
        rank, exchange = divmod(number, count)
        to, nbytes = exchanges[exchange]
        receiver = to[rank]
        if receiver < 0:
            over = [(number, now)]
        else:
            hops, overhead_s = way(rank, receiver)
            sent[number], arrival = ports.send(hops, nbytes, now + overhead_s, now)
            other = receiver * count + exchange
            came[other] = arrival + overhead_s
            over = [
                (one, max(sent.pop(one), came.pop(one)))
                for one in {number, other}
                if one in sent and one in came
            ]
        for one, at in over:
            rank, exchange = divmod(one, count)
            ends[rank] = at + waits[exchange + 1][rank]
            if exchange + 1 < count:
                heappush(events, (ends[rank], one + 1))
    return ends
