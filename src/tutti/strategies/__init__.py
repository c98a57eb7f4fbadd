"""The ways to train in parallel, by name."""

from __future__ import annotations

from tutti.errors import UnknownName
from tutti.strategies.adpsgd import ADPSGD
from tutti.strategies.base import Clip, Home, Strategy, Worker
from tutti.strategies.diloco import DiLoCo
from tutti.strategies.downpour import Downpour
from tutti.strategies.easgd import EASGD
from tutti.strategies.easgd_sync import EASGDSync
from tutti.strategies.gem import GEM
from tutti.strategies.gossip import Gossip
from tutti.strategies.hogwild import Hogwild
from tutti.strategies.lazy import Lazy
from tutti.strategies.local import Local
from tutti.strategies.paramserver import ParamServer
from tutti.strategies.placement import place
from tutti.strategies.solo import Solo
from tutti.strategies.sync import Sync

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        ADPSGD,
        DiLoCo,
        Downpour,
        EASGD,
        EASGDSync,
        GEM,
        Gossip,
        Hogwild,
        Lazy,
        Local,
        ParamServer,
        Solo,
        Sync,
    )
}

__all__ = [
    "ADPSGD",
    "EASGD",
    "GEM",
    "STRATEGIES",
    "Clip",
    "DiLoCo",
    "Downpour",
    "EASGDSync",
    "Gossip",
    "Hogwild",
    "Home",
    "Lazy",
    "Local",
    "ParamServer",
    "Solo",
    "Strategy",
    "Sync",
    "Worker",
    "named",
    "place",
]


def named(name: str) -> type[Strategy]:
    """The strategy called `name`.

    Raises:
        UnknownName: there is none.
    """
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    return STRATEGIES[name]
