"""The placement of ranks: hosts, threads, cores, and which of them are servers. Imports no torch.

--hosts a:2,b:2 --servers 3        host a   worker  worker  server  server
                                   host b   worker  worker  server
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadOption
from tutti.launch.allocation import find_allocation, in_words
from tutti.launch.cores import Cores, allowed_cores
from tutti.launch.launcher import Launcher, is_task, mpi_place, started_by
from tutti.launch.orphans import refuse_ended_launcher

MOST_PER_CORE: Final = 32
"""Limit on the ranks per core: the start of more may fill the memory and stop the machine."""

SLURM: Final = "slurm"
"""The value of `--hosts` for all nodes of Slurm's allocation, with a rank for each task."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Host:
    """A machine and its number of ranks."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Placement:
    """The ranks of a job, and where they run."""

    workers: int  # the ranks that train, over all hosts
    threads: int | None  # of each worker; None: every host decides, by its cores / its workers
    cores: tuple[tuple[int, ...], ...] = ()  # the logical CPUs that each worker is bound to, if it is
    warnings: tuple[str, ...] = ()  # sentences for the user to read before the run
    hosts: tuple[Host, ...] = ()  # where mpirun starts workers; empty for this machine alone
    launcher: Launcher = Launcher.ALONE
    servers: int = 0  # the last ranks of the job keep a parameter centre: one thread each, not bound
    places: tuple[Host, ...] = ()  # all given hosts and their places for workers; some may stand by
    away: tuple[Host, ...] = ()  # hosts that were lost, or did not answer: used only as a last resort

    @property
    def standing_by(self) -> tuple[Host, ...]:
        """The hosts without ranks."""
        used = {host.name for host in self.hosts}
        return tuple(host for host in self.places if host.name not in used)

    @property
    def ranks(self) -> int:
        """The number of ranks, servers included."""
        return self.workers + self.servers

    @property
    def hosts_with_servers(self) -> tuple[Host, ...]:
        """The hosts with all their ranks: the last one has the servers, too."""
        *others, last = self.hosts
        return (*others, Host(last.name, last.ranks + self.servers))

    def describe(self) -> str:
        """Describe the placement in one line, such as "2 ranks x 1 thread, bound to cores 0-1"."""
        line = _count(self.workers, "rank")
        if self.threads is not None:
            line += f" x {_count(self.threads, 'thread')}"
        if self.servers:
            line += f" and {_count(self.servers, 'server')}"
        if self.hosts:
            placed = ", ".join(f"{host.name}: {host.ranks}" for host in self.hosts)
            line += f" on {_count(len(self.hosts), 'host')} ({placed})"
        if self.standing_by:
            line += f", {', '.join(host.name for host in self.standing_by)} standing by"
        if self.launcher is not Launcher.ALONE:
            line += f", started by {self.launcher.value}"
        return line + _bound(self.cores)


def place_ranks(
    workers: str | int = "auto",
    threads: int | None = None,  # of each rank; None: the allowed cores of a host / its ranks
    cores: Cores | None = None,  # None: what the kernel allows this process
    *,
    hosts: str | None = None,  # as `read_hosts` takes them: mpirun starts the ranks
    servers: int = 0,  # further ranks for a parameter centre, on the last host
) -> Placement:
    """Decide the hosts, threads and cores of the ranks.

    "auto" is one worker for each core that this process may use; with `hosts`, the number of their places;
    under an MPI launcher, all its ranks but the servers.

    Raises:
        BadOption: a number that cannot be used, or that contradicts the hosts or the launcher.
        UserError: this process was started by a launcher that tutti cannot work under, or that has ended.
    """
    wanted = _wanted(workers)
    if servers < 0:
        raise BadOption(f"--servers is {servers}; the smallest possible is 0")
    if threads is not None and threads < 1:
        raise BadOption(f"--threads is {threads}; give a whole number of at least 1")
    context = started_by()
    if context.mpi:
        refuse_ended_launcher(os.environ)
    if context.launcher is not Launcher.ALONE:
        return _launched(context.launcher, context.size, wanted, threads, hosts, servers)
    if hosts is not None:
        return _on_hosts(read_hosts(hosts), wanted, threads, servers)
    cores = cores or allowed_cores()
    count = wanted or cores.usable
    refuse_too_many(count + servers, cores)
    placed = share_host(cores, count, threads)
    return replace(placed, servers=servers, warnings=(*placed.warnings, *_of_slurm()))


def refuse_too_many(ranks: int, cores: Cores) -> None:
    """Raise BadOption for a mistyped number of ranks."""
    most = MOST_PER_CORE * cores.usable
    if ranks > most:
        raise BadOption(
            f"{ranks:,} ranks are too many for {_count(cores.usable, 'core')}; give at most {most:,}"
        )


def share_host(cores: Cores, ranks: int, threads: int | None) -> Placement:
    """Place ranks on the cores of one host: consecutive groups whose sizes differ by at most one."""
    # One rank for each physical core is best; only when there are more ranks do hyperthreads count as cores.
    places = list(cores.physical) if ranks <= len(cores.physical) else [(cpu,) for cpu in cores.logical]
    time = len(places) if cores.quota is None else min(len(places), cores.quota)
    warnings: list[str] = []
    if ranks > time:
        warnings.append(
            f"{ranks} ranks are more than the {_count(time, 'core')} that they may use: they take turns, "
            f"so this is slower than {_count(time, 'rank')}, and they are not bound to cores"
        )
    elif threads is not None and ranks * threads > time:
        warnings.append(
            f"{_count(ranks, 'rank')} x {_count(threads, 'thread')} are more than the {_count(time, 'core')} "
            "that they may use: threads take turns, and ranks are not bound to cores"
        )
    each = threads or max(1, time // ranks)
    # Under a quota other containers share these cores, and would all bind to the first ones.
    bind = ranks > 1 and not warnings and not cores.limited
    return Placement(ranks, each, _groups(places, ranks) if bind else (), tuple(warnings))


def _groups(places: Sequence[tuple[int, ...]], ranks: int) -> tuple[tuple[int, ...], ...]:
    edges = [len(places) * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        tuple(sorted(cpu for place in places[first:last] for cpu in place))
        for first, last in itertools.pairwise(edges)
    )


def _wanted(workers: str | int) -> int | None:
    """Return the requested number of ranks; None for "auto"."""
    if workers == "auto":
        return None
    text = str(workers)
    if not text.isdecimal() or int(text) < 1:
        raise BadOption(f"--workers is '{workers}'; give a whole number of at least 1, or auto")
    return int(text)


def _launched(
    launcher: Launcher, size: int, wanted: int | None, threads: int | None, hosts: str | None, servers: int
) -> Placement:
    started = f"{launcher.value} has started {_count(size, 'rank')}"
    without = f"or run the command without {launcher.value}"
    if hosts is not None:
        raise BadOption(
            f"--hosts starts the ranks itself, but {started} already; leave --hosts out, {without}"
        )
    if servers >= size:
        raise BadOption(
            f"--servers is {servers}, but {started} in all, which leaves none to train; start more"
        )
    if wanted is not None and wanted != size - servers:
        kept = f", {servers} of them for servers" if servers else ""
        raise BadOption(f"--workers is {wanted}, but {started}{kept}; leave --workers out, {without}")
    return Placement(size - servers, threads, launcher=launcher, servers=servers)


def _of_slurm() -> Iterator[str]:
    """Yield a warning if Slurm has allocated more nodes than this one."""
    allocation = find_allocation(os.environ)
    alone = not (is_task(os.environ) or mpi_place(os.environ))
    if alone and allocation is not None and len(allocation.nodes) > 1:
        yield (
            f"Slurm has allocated {len(allocation.nodes)} nodes ({in_words(allocation.nodes)}), and this "
            "uses one of them; for all, give --hosts slurm, or start it with: srun --mpi=pmix tutti ..."
        )


def _on_hosts(hosts: tuple[Host, ...], wanted: int | None, threads: int | None, servers: int) -> Placement:
    slots = sum(host.ranks for host in hosts)
    if wanted is not None and wanted > slots:
        raise BadOption(
            f"--workers is {wanted}, but --hosts has places for {_count(slots, 'rank')}; "
            "leave --workers out, or name more hosts"
        )
    workers = wanted or slots
    return Placement(
        workers, threads, hosts=fill(hosts, workers), launcher=Launcher.MPIRUN, servers=servers, places=hosts
    )


def is_this_machine(name: str) -> bool:
    """Return whether a host's name, or its address, stands for this machine."""
    own = socket.gethostname()
    if name in ("localhost", "127.0.0.1", own, own.split(".")[0]):
        return True
    return name[0].isdecimal() and name in own_addresses()


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine; the last one is for its own ranks."""
    import psutil  # It would slow every start.

    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return (*found, "127.0.0.1")


def fill(places: Sequence[Host], workers: int) -> tuple[Host, ...]:
    """Return the hosts with `workers` in all; each is filled before the next one."""
    filled: list[Host] = []
    for host in places:
        taken = min(host.ranks, workers - sum(one.ranks for one in filled))
        if taken:
            filled.append(Host(host.name, taken))
    return tuple(filled)


def _bound(cores: Sequence[tuple[int, ...]]) -> str:
    """Return the end of the line, such as ", bound to cores 0-3", or nothing."""
    cpus = sorted(cpu for group in cores for cpu in group)
    return f", bound to core{'s' * (len(cpus) > 1)} {_ranges(cpus)}" if cpus else ""


def _ranges(cpus: Sequence[int]) -> str:
    """Return sorted CPU numbers in the kernel's notation, such as "0-3+8"."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return "+".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def read_hosts(given: str) -> tuple[Host, ...]:
    """Read the option `--hosts`: "a:4,b:4", the path of a host file, or "slurm" for Slurm's allocation.

    The lines of a host file read "a slots=4", "a:4" or "a"; a # begins a comment. BadOption: there is no host
    in it, a name or number cannot be used, or a host is named twice.
    """
    if given == SLURM:
        allocation = find_allocation(os.environ)
        if allocation is None:
            raise BadOption(
                "--hosts slurm takes the nodes of Slurm's allocation, and this process is in none; get one "
                "with salloc or sbatch, or name the hosts: --hosts node1:4,node2:4"
            )
        return tuple(map(Host, allocation.nodes, allocation.tasks))
    entries, path = given.split(","), Path(given)
    if path.is_file() or "/" in given:
        try:
            lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadOption(
                f"cannot read the host file {path}: {error}; or give --hosts node1:4,node2:4"
            ) from None
        entries = [line for line in lines if line]
    hosts = tuple(map(_host, entries))
    names = [host.name for host in hosts]
    if not names or len(set(names)) < len(names):
        raise BadOption(f"--hosts '{given}' names no host, or one twice; name each once: node1:4,node2:4")
    return hosts


def _host(entry: str) -> Host:
    name, colon, number = re.sub(r"\s+slots\s*=\s*", ":", entry.strip()).partition(":")
    ranks = number if colon else "1"
    if not _HOST_NAME.fullmatch(name) or not ranks.isdecimal() or int(ranks) < 1:
        raise BadOption(
            f"'{entry}' of --hosts is not a host; write a name and its number of ranks, such as node1:4"
        )
    return Host(name, int(ranks))
