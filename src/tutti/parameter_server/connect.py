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
    """Take part in a centre (collective over the workers). Its first weights are those of worker 0.

    Args:
        comm: the workers; `comm.servers` says whether there are ranks that hold the centre.
        replica: the model; its weights are the same on every worker.
        rule: what the centre does with a message; this worker's own object, made alike on all of them.

    Returns:
        In shared memory, when all workers are on one host and there are no servers; else on the servers, with
        a centre on each host below them if `comm.servers.levels` is 2.

    Raises:
        BadOption: the workers are on several hosts and there is no server.
    """
    servers = comm.servers
    if servers is None:
        check_reachable(comm.hosts, 0)
        return SharedCentre(comm, replica.flats, rule)
    if servers.levels > 1:
        return LevelledCentre(comm, servers, replica.flats, rule)
    return ServedCentre(comm, servers, replica.flats, rule)


def workers_of_centre(comm: Communicator) -> int:
    """Return the number of workers at this one's centre: all, or with two levels those of its host."""
    return comm.node.size if comm.servers is not None and comm.servers.levels > 1 else comm.size


def check_reachable(hosts: int, servers: int) -> None:
    """Refuse, by `BadOption`, a centre that some workers could not reach: several hosts and no server."""
    if hosts > 1 and not servers:
        raise BadOption(
            f"the workers are on {hosts} hosts, but the centre is in the memory of one; keep a rank for it "
            "with '--servers 1'"
        )
