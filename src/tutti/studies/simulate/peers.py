"""The replay of workers that exchange with a few others in each round, event by event."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy

from tutti.strategies import Gossip, NoLoCo, Strategy
from tutti.strategies.gossip import links
from tutti.strategies.noloco import order_of_pairs
from tutti.studies.simulate.cluster import HostLayout
from tutti.studies.simulate.pattern import StepSequence
from tutti.studies.simulate.ports import PortUse, send
from tutti.studies.simulate.step_times import Floats


def partners(strategy: Strategy, size: int, turn: int) -> tuple[list[int], ...]:
    """Return the rank that each rank sends to in each exchange of a round; -1: it rests.

    Args:
        strategy: of `WITH_PEERS`.
        size: the number of workers.
        turn: the number of earlier rounds.
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
    """Return the time at which each worker ends, in seconds.

    A worker continues when it has sent its vector and received its partner's:

        worker 0   │ computes │ sends ──▶ 1        │ computes
        worker 1   │ computes    │ sends ──▶ 0, receives │ computes

    Args:
        strategy: chooses the partners.
        steps: the communication.
        cluster: the ranks.
        work: the seconds that each worker computes in each step, of shape (steps, ranks).
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
    ranks, count, ends = cluster.ranks, len(exchanges), list(waits[0])
    ways: dict[int, tuple[tuple[PortUse, ...], float]] = {}  # by the numbers of sender and receiver
    # By the number of worker and exchange: the time when its vector is sent, and when the partner's arrives.
    sent: dict[int, float] = {}
    came: dict[int, float] = {}
    events = [(at, rank * count) for rank, at in enumerate(ends) if count]
    heapify(events)

    def end_exchange(number: int, rank: int, exchange: int, at: float) -> None:
        ends[rank] = at = at + waits[exchange + 1][rank]
        if exchange + 1 < count:
            heappush(events, (at, number + 1))

    while events:
        now, number = heappop(events)
        rank, exchange = divmod(number, count)
        to, nbytes = exchanges[exchange]
        receiver = to[rank]
        if receiver < 0:
            end_exchange(number, rank, exchange, now)
            continue
        pair = rank * ranks + receiver
        if pair not in ways:
            ways[pair] = cluster.way(rank, receiver), cluster.overhead_s(rank, receiver)
        way, overhead_s = ways[pair]
        done, arrival = send(way, nbytes, now + overhead_s, now)
        arrival += overhead_s
        other = receiver * count + exchange
        if other in sent:
            end_exchange(other, receiver, exchange, max(arrival, sent.pop(other)))
        else:
            came[other] = arrival
        if number in came:
            end_exchange(number, rank, exchange, max(done, came.pop(number)))
        else:
            sent[number] = done
    return ends
