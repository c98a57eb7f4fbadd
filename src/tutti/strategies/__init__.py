"""Strategies for training in parallel, by name."""

from __future__ import annotations

from tutti import parts
from tutti.errors import BadOption
from tutti.load_object import load_object, names_object
from tutti.registry import Registry
from tutti.strategies.adpsgd import ADPSGD
from tutti.strategies.async_diloco import AsyncDiLoCo
from tutti.strategies.base import Clip, Strategy, WeightPlacement, Worker
from tutti.strategies.diloco import DiLoCo
from tutti.strategies.downpour import Downpour
from tutti.strategies.easgd import EASGD
from tutti.strategies.easgd_sync import EASGDSync
from tutti.strategies.gem import GEM
from tutti.strategies.gossip import Gossip
from tutti.strategies.hogwild import Hogwild
from tutti.strategies.lazy import Lazy
from tutti.strategies.local import Local
from tutti.strategies.noloco import NoLoCo
from tutti.strategies.paramserver import ParamServer
from tutti.strategies.placement import place, visible_memory
from tutti.strategies.solo import Solo
from tutti.strategies.sparseloco import SparseLoCo
from tutti.strategies.sync import Sync

STRATEGIES: Registry[type[Strategy]] = parts.STRATEGIES
"""The strategies by name: each file of this package with a `@part`."""

__all__ = [
    "ADPSGD",
    "EASGD",
    "GEM",
    "STRATEGIES",
    "AsyncDiLoCo",
    "Clip",
    "DiLoCo",
    "Downpour",
    "EASGDSync",
    "Gossip",
    "Hogwild",
    "Lazy",
    "Local",
    "NoLoCo",
    "ParamServer",
    "Solo",
    "SparseLoCo",
    "Strategy",
    "Sync",
    "WeightPlacement",
    "Worker",
    "named",
    "place",
    "visible_memory",
]


def named(name: str) -> type[Strategy]:
    """Return the strategy called `name`, or the class that `package.module:Class` or `file.py:Class` names.

    Raises:
        UnknownName: there is no such strategy.
        BadOption: the class cannot be imported, or is not a strategy.
    """
    if not names_object(name):
        return STRATEGIES.named(name)
    strategy = load_object(name, "strategy")
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        kind = strategy.__name__ if isinstance(strategy, type) else f"a {type(strategy).__name__}"
        raise BadOption(
            f"the strategy '{name}' is {kind}, which is no subclass of tutti.strategies.Strategy; derive it "
            "from that (docs/write-your-own-strategy.md shows how)"
        )
    abstract = sorted(strategy.__abstractmethods__)
    missing = [needed for needed in ("name", "home") if not hasattr(strategy, needed)] + abstract
    if missing:
        raise BadOption(
            f"the strategy '{name}' does not define: {', '.join(missing)}; every strategy must have these"
        )
    return strategy
