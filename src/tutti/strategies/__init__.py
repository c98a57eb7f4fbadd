"""The ways to train in parallel, by name."""

from __future__ import annotations

from tutti.errors import UnknownName
from tutti.strategies.base import Clip, Home, Strategy, Worker
from tutti.strategies.placement import place
from tutti.strategies.solo import Solo
from tutti.strategies.sync import Sync

STRATEGIES: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in (Solo, Sync)}

__all__ = ["STRATEGIES", "Clip", "Home", "Solo", "Strategy", "Sync", "Worker", "named", "place"]


def named(name: str) -> type[Strategy]:
    """The strategy called `name`.

    Raises:
        UnknownName: there is none.
    """
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    return STRATEGIES[name]
