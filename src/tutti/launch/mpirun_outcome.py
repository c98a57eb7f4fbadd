"""What the end of mpirun, and of the ranks that it had started, means for the job."""

from __future__ import annotations

import pickle
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tutti.errors import HostLost, LauncherLost, OutputClosed, PeerLost, TuttiError, UserError
from tutti.launch.exit_reports import Death, Report, cause, killed_by, output_closed
from tutti.launch.liveness import FAILED, LivenessWatch, RankEnd, first_lost
from tutti.launch.placement import Host

START_S: Final = 300
"""Seconds that MPI may take to start in a rank. Where it tolerates dead ranks, it waits for them then."""

LATE_S: Final = 120.0
"""Time of all ranks to begin, where the run goes on without a host that does not."""

KILLED: Final = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal\s+(\d+)")
"""What Open MPI's mpirun says of a rank that a signal has ended."""

_HOST_LOST = re.compile(
    r"lost communication with a remote daemon.*Remote daemon:.*? on node (\S+)"
    r"|A daemon failed to report back.*Remote host: +(\S+)",
    re.DOTALL,
)
_NO_FOLDER = 213
"""The exit code of Open MPI's daemons that cannot make their folder."""


def outcome(
    reports: Sequence[Report],
    returncode: int | None,
    said: str,
    watch: LivenessWatch | None = None,
    hosts: Sequence[Host] = (),
) -> object:
    """The result of rank 0, or the error that the job ended with.

    Args:
        reports: of ranks of this machine.
        returncode: of mpirun; None: it was ended, as a rank was lost.
        said: the end of what mpirun has said.
        watch: over the ranks of all hosts.
        hosts: theirs.
    """
    if returncode is not None and returncode < 0:
        raise LauncherLost(f"mpirun, which had started the ranks, was {killed_by(-returncode)}")
    ends = [] if watch is None else watch.ends
    killed = KILLED.search(said)
    deaths = [Death(int(killed[1]), time.monotonic(), -int(killed[2]))] if killed else []
    begun = watch is None or watch.complete
    deaths = _first_death(ends, deaths, hosts) if begun else deaths
    error, _ = cause(reports, deaths)
    # A rank gives signs once MPI has started.
    signs = {} if watch is None else watch.signs
    if any(death.returncode == -signal.SIGALRM and death.rank not in signs for death in deaths):
        error = LauncherLost(
            f"MPI did not start within {START_S} s: a rank has ended before, or cannot reach the others"
        )
    # Open MPI's exit code is then 0.
    if (host := lost_host(said)) and (error is None or isinstance(error, PeerLost)):
        error = HostLost(
            [host],
            ranks_of(host, hosts),
            "mpirun's daemon there has ended, or cannot be reached any more; start again without that host, "
            "or when it is back",
        )
    # Where mpirun has ended, so have the ranks of all hosts that it reached.
    left = [] if watch is None or returncode is None else watch.left
    silent = [end.rank for end in ends if end.silent] or left
    if silent and (error is None or isinstance(error, PeerLost)):
        names = dict.fromkeys(host_of(rank, hosts) for rank in silent)
        error = HostLost(names, silent, "it cannot be reached any more")
    if error is not None:
        raise error
    if returncode is None and watch is not None:
        missing = [rank for rank in range(sum(host.ranks for host in hosts)) if rank not in watch.seen]
        raise HostLost(
            dict.fromkeys(host_of(rank, hosts) for rank in missing),
            missing,
            f"no rank of it has begun within {LATE_S:g} s, or a firewall keeps it from port "
            f"{watch.address.port} of this machine",
        )
    if returncode != 0 and output_closed():
        raise OutputClosed("nobody reads standard output any more")
    if returncode == UserError.exit_code:
        raise UserError("a rank on another host found that the input is wrong; its message stands above")
    if returncode != 0:
        failed = _failed(ends, hosts)
        if failed:
            # Its exception would come again.
            raise TuttiError(f"{failed}; what it said stands above")
        full = ", or make room for the temporary files there: df /tmp" * (returncode == _NO_FOLDER)
        raise LauncherLost(
            f"mpirun ended with exit code {returncode}; what it said stands above. "
            f"Try the hosts with: mpirun --host HOST:1 hostname{full}"
        )
    values = [report.value for report in reports if report.value is not None]
    return pickle.loads(values[0]) if values else None


def _failed(ends: Sequence[RankEnd], hosts: Sequence[Host]) -> str:
    """Name the first rank that has said that it failed, and its host; nothing if none has."""
    failed = next((end.rank for end in ends if end.letter == FAILED), None)
    return "" if failed is None else f"rank {failed} failed on host {host_of(failed, hosts)}"


def _first_death(ends: Sequence[RankEnd], said: Sequence[Death], hosts: Sequence[Host]) -> list[Death]:
    """The death that came first: by the ends of connections, else by what mpirun has said of one."""
    first = first_lost(ends)
    if not first:
        return list(said)
    end = next(end for end in ends if end.rank == first[0])
    if end.returncode is not None:
        return [Death(end.rank, end.at, end.returncode)]
    known = [replace(death, at=end.at) for death in said if death.rank == end.rank]
    why = f"it ended on host {host_of(end.rank, hosts)} before it was done, and nobody has seen by what"
    return known or [Death(end.rank, end.at, 0, hung=why)]


def hosts_of(ranks: Sequence[int], hosts: Sequence[Host]) -> str:
    """Name the hosts of some ranks."""
    names = dict.fromkeys(host_of(rank, hosts) for rank in ranks)
    return f"host{'s' * (len(names) > 1)} {', '.join(names)}"


def host_of(rank: int, hosts: Sequence[Host]) -> str:
    """The name of a rank's host; ranks are numbered host after host."""
    return [host.name for host in hosts for _ in range(host.ranks)][rank]


def ranks_of(name: str, hosts: Sequence[Host]) -> list[int]:
    """The ranks of a host."""
    names = [host.name for host in hosts for _ in range(host.ranks)]
    return [rank for rank, one in enumerate(names) if one == name]


def lost_host(said: str) -> str | None:
    """Return the host that mpirun says it has lost, in what it has written to standard error."""
    found = _HOST_LOST.search(said)
    return None if found is None else found[1] or found[2]
