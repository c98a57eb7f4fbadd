"""A check of the ranks that mpirun or srun has started. Needs no torch.

    launcher ──► rank 0: tutti doctor --mpi ──► child 0 ─┐
             ──► rank 1: tutti doctor --mpi ──► child 1 ─┴ MPI: child 0 gathers all views and prints them

MPI may hang, or end the process that initialises it. So each rank leaves that to a child.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from tutti.launch.allocation import find_allocation
from tutti.launch.launcher import LaunchContext, mpi_place
from tutti.launch.orphans import follow_launcher, refuse_ended_launcher
from tutti.launch.world import leave_world_of_one
from tutti.studies.doctor import PATIENCE_S, Finding, last_line, listed, mpi_library, version_of

WRONG: Final = "wrong"
"""The name of a finding about a problem."""

JOINING: Final = (
    "mpirun --mca btl_tcp_if_include 10.0.0.0/24, or under srun OMPI_MCA_btl_tcp_if_include=10.0.0.0/24"
)
"""The option of Open MPI for the network to use."""

_PACKAGES: Final = ("tutti", "torch", "mpi4py")


@dataclass(frozen=True)
class Seen:
    """The job as one rank sees it."""

    rank: int  # by the launcher
    size: int  # the number of ranks, by the launcher
    mpi_size: int  # the number of ranks, by MPI
    launcher: str
    host: str
    library: str = ""  # MPI's name and version
    file: str = ""  # of the library
    cpus: Sequence[int] = ()  # the logical CPUs that the rank may use
    host_cpus: int = 1  # the number of CPUs of the host, or of its Slurm allocation
    networks: Sequence[str] = ()  # such as "10.0.0.7/24"; without loopback
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python and packages; equal on all ranks


def examine_ranks() -> list[Finding]:
    """Return the findings about the ranks of this job, on rank 0."""
    place = mpi_place(os.environ)
    if place is None:
        return _without_launcher()
    command = [sys.executable, "-P", "-m", "tutti.studies.mpi_doctor"]
    # The inherited connection of MPICH's ranks to their launcher.
    kept = [int(number) for number in (os.environ.get("PMI_FD", ""),) if number.isdecimal()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, pass_fds=kept
        )
    except subprocess.TimeoutExpired:
        text = f"the ranks did not meet within {PATIENCE_S} s; if hosts have several networks, name the "
        text += f"common one: {JOINING}"
        return [(WRONG, text)] if place.rank == 0 else []
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode != 0 or (place.rank == 0 and not lines):
        return [(WRONG, f"MPI did not start on rank {place.rank}: {last_line(done.stderr)}")]
    return report([Seen(**one) for one in json.loads(lines[0])]) if place.rank == 0 else []


def main() -> None:
    """Run as the child of a rank: gather the views of all ranks; rank 0 prints them."""
    from tutti.comm.mpi.library import from_all, library, library_file, world_place

    place = mpi_place(os.environ)
    assert place is not None
    refuse_ended_launcher(os.environ)
    follow_launcher()
    _, size, _ = world_place()
    mine = look(place, size, library(), library_file())
    seen = from_all(asdict(mine))
    if place.rank == 0:
        print(json.dumps(seen), flush=True)
    if size == 1:
        leave_world_of_one()


def look(place: LaunchContext, mpi_size: int, library: str, file: str) -> Seen:
    """Return this process's view of the job."""
    versions = {"Python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
    allotted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return Seen(
        place.rank,
        place.size,
        mpi_size,
        place.launcher.value,
        socket.gethostname(),
        library,
        file,
        sorted(os.sched_getaffinity(0)),
        int(allotted) if allotted.isdecimal() else os.cpu_count() or 1,
        networks_here(),
        versions,
    )


def networks_here() -> list[str]:
    """Return the IPv4 addresses of this host, such as "10.0.0.7/24", without loopback."""
    import psutil

    interfaces = [
        ipaddress.ip_interface(f"{one.address}/{one.netmask}")
        for several in psutil.net_if_addrs().values()
        for one in several
        if one.family == socket.AF_INET and one.netmask
    ]
    return [str(one) for one in interfaces if not one.is_loopback]


def report(seen: Sequence[Seen]) -> list[Finding]:
    """Return the findings about ranks with these views."""
    first = seen[0]
    findings = [
        ("ranks", f"{first.size}, started by {first.launcher}; MPI sees {first.mpi_size}"),
        ("MPI", f"{first.library}, in {first.file or 'an unknown file'}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in first.versions.items())),
    ]
    for host, ranks in by_host(seen).items():
        numbers = ", ".join(str(one.rank) for one in ranks)
        bound = "; ".join(dict.fromkeys(f"CPUs {listed(one.cpus)}" for one in ranks))
        addresses = ", ".join(ranks[0].networks) or "no address but the loopback's"
        findings.append((f"host {host}", f"rank {numbers}; {bound} of {ranks[0].host_cpus}; {addresses}"))
    return findings + ([(WRONG, text) for text in wrongs(seen)] or [("verdict", "nothing is wrong")])


def wrongs(seen: Sequence[Seen]) -> list[str]:
    """Return the problems of the ranks, and their remedies."""
    first, hosts = seen[0], by_host(seen)
    problems = [_two_mpis(first)] if first.mpi_size < first.size else []
    kinds = {f"MPI's {name}": {one.host: getattr(one, name) for one in seen} for name in ("library", "file")}
    kinds |= {name: {one.host: one.versions.get(name, "none") for one in seen} for name in first.versions}
    for name, values in kinds.items():
        if len(set(values.values())) > 1:
            listing = ", ".join(f"{host}: {value}" for host, value in values.items())
            problems.append(f"{name} differs ({listing}): use one environment on all hosts")
    networks = [
        {ipaddress.ip_interface(one).network for one in ranks[0].networks} for ranks in hosts.values()
    ]
    if len(hosts) > 1 and not set.intersection(*networks):
        listing = "; ".join(
            f"{host}: {', '.join(ranks[0].networks) or 'none'}" for host, ranks in hosts.items()
        )
        problems.append(
            f"no network is common to all hosts ({listing}): they need a route between their networks"
        )
    return problems


def _two_mpis(one: Seen) -> str:
    text = (
        f"{one.launcher} started {one.size} ranks, but in each MPI sees {one.mpi_size}: {one.launcher} and "
        f"the library of mpi4py, {one.library}, do not belong together. "
    )
    if one.launcher == "srun":
        return text + "Try 'srun --mpi=pmix', or let mpirun start the ranks: tutti train --hosts slurm"
    return text + f"Use the mpirun of {one.file or 'that library'}, or mpirun's own: MPI4PY_LIBMPI=FILE"


def by_host(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """Return the ranks of each host; hosts are in the order of their lowest ranks."""
    hosts: dict[str, list[Seen]] = {}
    for one in sorted(seen, key=lambda one: one.rank):
        hosts.setdefault(one.host, []).append(one)
    return hosts


def _without_launcher() -> list[Finding]:
    """Describe the MPI library, mpirun and Slurm's allocation."""
    findings = [("MPI", mpi_library()), ("mpirun", shutil.which("mpirun") or "none on the PATH")]
    allocation = find_allocation(os.environ)
    if allocation is not None:
        findings.append(("Slurm", f"{len(allocation.nodes)} nodes: {', '.join(allocation.nodes)}"))
    launcher = "mpirun -n 2" if allocation is None else "srun --mpi=pmix"
    return [*findings, ("ranks", f"none; see them with: {launcher} tutti doctor --mpi")]


if __name__ == "__main__":
    main()
