"""The choice of a centre's form: in shared memory, on servers, or both."""

from __future__ import annotations

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.parameter_server.base import Centre, Rule
from tutti.parameter_server.client import ServedCentre
from tutti.parameter_server.levels import LevelledCentre
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.replica import Replica


def join_centre(comm: Communicator, replica: Replica, rule: Rule) -> Centre:
    """Join a centre with worker 0's weights (collective), in shared memory if `comm` has no servers."""
    servers = comm.servers
    if servers is None:
        check_reachable(comm.hosts, 0)
        return SharedCentre(comm, replica.flats, rule)
    if servers.levels > 1:
        return LevelledCentre(comm, servers, replica.flats, rule)
    return ServedCentre(comm, servers, replica.flats, rule)


def workers_of_centre(comm: Communicator) -> int:
    """Return the number of workers at this one's centre: all, or with two levels the ones of its host."""
    return comm.node.size if comm.servers is not None and comm.servers.levels > 1 else comm.size


def check_reachable(hosts: int, servers: int) -> None:
    """Raise BadOption for a centre that some workers cannot reach: several hosts and no server."""
    if hosts > 1 and not servers:
        raise BadOption(
            f"the workers are on {hosts} hosts, but the centre is in the memory of one; keep a rank for it "
            "with '--servers 1'"
        )
