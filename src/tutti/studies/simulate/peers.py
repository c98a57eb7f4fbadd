"""The partners of all workers in a round of a strategy whose workers exchange with some others."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from tutti.strategies import Gossip, NoLoCo, Strategy
from tutti.strategies.gossip import links
from tutti.strategies.noloco import order_of_pairs


class Partners(NamedTuple):
    """The partners of an exchange, by rank: whom each sends to and gets from; -1: it rests."""

    to: NDArray[numpy.int64]
    source: NDArray[numpy.int64]


def has_peers(strategy: Strategy) -> bool:
    """Return whether `partners` knows the strategy."""
    return isinstance(strategy, Gossip | NoLoCo)


def partners(strategy: Strategy, size: int, turn: int) -> tuple[Partners, ...]:
    """Return the partners in each exchange of a round.

    Args:
        strategy: one that `has_peers`.
        size: the number of workers.
        turn: the number of rounds before this one.
    """
    if isinstance(strategy, NoLoCo):
        order = numpy.array(order_of_pairs(size, turn + 1, strategy.seed))
        other = numpy.full(size, -1)
        even = size // 2 * 2
        other[order[0:even:2]], other[order[1:even:2]] = order[1:even:2], order[0:even:2]
        return (Partners(other, other),)
    assert isinstance(strategy, Gossip)
    return _linked(strategy.graph, size, turn if strategy.graph == "shift_one" else 0)


@lru_cache(maxsize=16)
def _linked(graph: str, size: int, turn: int) -> tuple[Partners, ...]:
    found = [links(graph, rank, size, turn) for rank in range(size)]
    exchanges = []
    for number in range(max(map(len, found))):
        both = [of_rank[number] if number < len(of_rank) else (-1, -1) for of_rank in found]
        exchanges.append(Partners(*numpy.array(both).T))
    return tuple(exchanges)
