"""The choice of the ranks that keep the parameter centre instead of working.

--hosts a:2,b:2 --servers 3        host a   worker  worker  server  server
                                   host b   worker  worker  server
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tutti.comm.base import Communicator


def servers_per_host(hosts: int, servers: int) -> list[int]:
    """Return the number of servers of each host, which get them in turn."""
    return [servers // hosts + (host < servers % hosts) for host in range(hosts)]


def choose_servers(homes: Sequence[int], servers: int) -> list[int]:
    """Choose the ranks to be servers: the last ones of each host, the hosts taken in turn.

    Args:
        homes: for each rank a number that stands for its host.
        servers: how many to choose; fewer than there are ranks.

    Returns:
        Their ranks in order. A host keeps a worker as long as another one has several ranks left; rank 0 is
        always a worker.
    """
    left: dict[int, list[int]] = {}
    for rank, home in enumerate(homes):
        left.setdefault(home, []).append(rank)
    chosen: list[int] = []
    while len(chosen) < servers:
        several = [ranks for ranks in left.values() if len(ranks) > 1]
        for ranks in several or list(left.values())[:0:-1]:
            if len(chosen) < servers:
                chosen.append(ranks.pop())
        left = {home: ranks for home, ranks in left.items() if ranks}
    return sorted(chosen)


def split_off_servers(
    comm: Communicator, servers: int, levels: int = 1, climb_every: int = 10
) -> Communicator:
    """Keep the last ranks of every host for the parameter centre (collective).

    Args:
        comm: all ranks of the job.
        servers: how many of them are to be servers.
        levels: of centres, as in `Servers`.
        climb_every: how often the lower level meets the upper one, as in `Servers`.

    Returns:
        The workers' communicator, or the servers' on a server; `comm` itself where there are no servers.
    """
    from tutti.comm.base import keep_servers

    if not servers:
        return comm
    leader = comm.node.broadcast_object(comm.rank)
    homes = cast("list[int]", comm.all_gather_objects(leader))
    return keep_servers(comm, choose_servers(homes, servers), levels, climb_every)
