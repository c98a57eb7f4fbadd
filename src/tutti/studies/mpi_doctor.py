"""The ranks that mpirun or srun has started, as each of them sees the job, and what is wrong. No torch.

    launcher ──► rank 0: tutti doctor --mpi ──► child 0 ─┐
             ──► rank 1: tutti doctor --mpi ──► child 1 ─┴ MPI: each tells what it sees, child 0 prints it

MPI may hang, or end the process that begins it: so a child of each rank does that, and the rank waits for it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Final

from tutti.launch.allocation import find_allocation, in_words
from tutti.launch.launcher import LaunchContext, mpi_place
from tutti.launch.mpi_library import refuse_unloadable
from tutti.launch.orphans import follow_launcher, refuse_ended_launcher
from tutti.launch.world import leave_world_of_one
from tutti.studies.doctor import PATIENCE_S, Finding, mpi_library

WRONG: Final = "wrong"
"""The name of a finding that says what is wrong."""

JOINING: Final = (
    "mpirun --mca btl_tcp_if_include 10.0.0.0/24, or under srun OMPI_MCA_btl_tcp_if_include=10.0.0.0/24"
)
"""The network that MPI is to take, as Open MPI is told it."""

_PACKAGES: Final = ("tutti", "torch", "mpi4py")


@dataclass(frozen=True)
class Seen:
    """The view that one rank has of the job.

    Attributes:
        rank: its number, as the launcher tells it.
        size: the number of ranks, as the launcher tells it.
        mpi_size: the number of ranks that MPI sees.
        launcher: what started it.
        host: the name of its host.
        library: the MPI library's name and version.
        file: the file that it is in.
        cpus: the logical CPUs that the rank may use.
        host_cpus: how many its host has, or Slurm has allocated there.
        networks: the host's addresses with their networks' lengths, such as "10.0.0.7/24"; but the
            loopback's.
        versions: of Python and the packages that all ranks should have alike.
    """

    rank: int
    size: int
    mpi_size: int
    launcher: str
    host: str
    library: str = ""
    file: str = ""
    cpus: tuple[int, ...] = ()
    host_cpus: int = 1
    networks: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def examine_ranks() -> list[Finding]:
    """Findings about the ranks of the job that this process is one of; none on any but the first rank."""
    place = mpi_place(os.environ)
    if place is None:
        return _without_launcher()
    asked = [sys.executable, "-P", "-m", "tutti.studies.mpi_doctor"]
    # The connection of MPICH's ranks to their launcher, which they inherit.
    kept = [int(number) for number in (os.environ.get("PMI_FD", ""),) if number.isdecimal()]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=PATIENCE_S, check=False, pass_fds=kept
        )
    except subprocess.TimeoutExpired:
        several = f"where hosts have several networks, name the one that joins all of them: {JOINING}"
        return _unmet(place, f"the ranks did not meet within {PATIENCE_S} s; {several}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode != 0 or (place.rank == 0 and not lines):
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return _unmet(place, f"MPI did not start: {said}")
    return report([_seen_from(one) for one in json.loads(lines[0])]) if place.rank == 0 else []


def main() -> None:
    """Be the child of a rank: tell the others what it sees; rank 0 prints what all have told."""
    from tutti.comm.mpi.library import from_all, library, library_file, world_place

    place = mpi_place(os.environ)
    assert place is not None
    refuse_ended_launcher(os.environ)
    follow_launcher()
    refuse_unloadable(os.environ)
    _, size, _ = world_place()
    mine = look(place, size, library(), library_file())
    seen = from_all(asdict(mine))
    if place.rank == 0:
        print(json.dumps(seen), flush=True)
    if size == 1:
        leave_world_of_one()


def look(place: LaunchContext, mpi_size: int = 0, library: str = "", file: str = "") -> Seen:
    """Return what this process sees."""
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    told = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return Seen(
        place.rank,
        place.size,
        mpi_size,
        place.launcher.value,
        socket.gethostname(),
        library,
        file,
        tuple(sorted(os.sched_getaffinity(0))),
        int(told) if told.isdecimal() else os.cpu_count() or 1,
        networks_here(),
        versions,
    )


def networks_here() -> tuple[str, ...]:
    """The IPv4 addresses of this host with the lengths of their networks, without the loopback's."""
    import psutil

    found = [
        ipaddress.ip_interface(f"{one.address}/{one.netmask}")
        for several in psutil.net_if_addrs().values()
        for one in several
        if one.family == socket.AF_INET and one.netmask
    ]
    return tuple(str(one) for one in found if not one.is_loopback)


def report(seen: Sequence[Seen]) -> list[Finding]:
    """Describe the ranks, and say what is wrong with them."""
    first = seen[0]
    findings = [
        ("ranks", f"{first.size}, started by {first.launcher}; MPI sees {first.mpi_size}"),
        ("MPI", f"{first.library}, in {first.file or 'an unknown file'}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in first.versions.items())),
    ]
    for host, ranks in by_host(seen).items():
        numbers = ", ".join(str(one.rank) for one in ranks)
        bound = "; ".join(dict.fromkeys(f"CPUs {_listed(one.cpus)}" for one in ranks))
        addresses = ", ".join(ranks[0].networks) or "no address but the loopback's"
        findings.append((f"host {host}", f"rank {numbers}; {bound} of {ranks[0].host_cpus}; {addresses}"))
    return findings + ([(WRONG, text) for text in wrongs(seen)] or [("verdict", "nothing is wrong")])


def wrongs(seen: Sequence[Seen]) -> list[str]:
    """Return what is wrong with the ranks, and what to do about it."""
    first, found = seen[0], []
    if first.mpi_size < first.size:
        found.append(_two_mpis(first))
    for name in ("library", "file"):
        texts = _differing(seen, name)
        if texts:
            found.append(f"the ranks use different MPI libraries ({texts}): install the same on all hosts")
            break
    for name in first.versions:
        versions = {one.host: one.versions.get(name, "none") for one in seen}
        if len(set(versions.values())) > 1:
            told = ", ".join(f"{host}: {version}" for host, version in versions.items())
            found.append(f"{name} differs ({told}): use one environment on all hosts")
    return found + _wrong_networks(seen)


def _two_mpis(one: Seen) -> str:
    text = (
        f"{one.launcher} started {one.size} ranks, but in each MPI sees {one.mpi_size}: every rank would "
        f"take itself for the first. {one.launcher} and the library of mpi4py, {one.library}, do not belong "
        "together. "
    )
    if one.launcher == "srun":
        return text + (
            "Try 'srun --mpi=pmix' ('srun --mpi=list' shows what there is), or have mpirun start the ranks "
            "of the allocation: tutti train --hosts slurm"
        )
    return text + f"Take the mpirun of {one.file or 'that library'}, or its own library: MPI4PY_LIBMPI=FILE"


def _wrong_networks(seen: Sequence[Seen]) -> list[str]:
    hosts = {host: ranks[0].networks for host, ranks in by_host(seen).items()}
    if len(hosts) == 1:
        return []
    found = []
    for address in dict.fromkeys(_address(one) for networks in hosts.values() for one in networks):
        having = [host for host, networks in hosts.items() if address in map(_address, networks)]
        if len(having) > 1:
            found.append(
                f"{in_words(having)} have the same address {address}, as of a bridge that each has of its "
                f"own: a rank that connects to it finds itself. Name the network that joins them: {JOINING}"
            )
    if not set.intersection(*({_network(one) for one in networks} for networks in hosts.values())):
        told = "; ".join(f"{host}: {', '.join(networks) or 'none'}" for host, networks in hosts.items())
        found.append(
            f"no network is common to all hosts ({told}): they reach each other only where what joins "
            "their networks is routed"
        )
    return found


def _address(interface: str) -> str:
    return interface.partition("/")[0]


def _network(interface: str) -> str:
    return str(ipaddress.ip_interface(interface).network)


def by_host(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """The ranks of each host, hosts in the order of their lowest ranks."""
    hosts: dict[str, list[Seen]] = {}
    for one in sorted(seen, key=lambda one: one.rank):
        hosts.setdefault(one.host, []).append(one)
    return hosts


def _differing(seen: Sequence[Seen], name: str) -> str:
    """What the ranks have, by host, where they have not all the same; else nothing."""
    texts = {one.host: str(getattr(one, name)) for one in seen}
    return (
        "; ".join(f"{host}: {text}" for host, text in texts.items()) if len(set(texts.values())) > 1 else ""
    )


def _listed(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus)) if len(cpus) <= 8 else f"{cpus[0]} to {cpus[-1]} ({len(cpus)} of them)"


def _seen_from(told: dict[str, object]) -> Seen:
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return Seen(**known)  # type: ignore[arg-type]


def _unmet(place: LaunchContext, why: str) -> list[Finding]:
    """What a rank that met no other one can say: its own host, and on the first rank the reason."""
    own = look(place)
    host = f"rank {own.rank} of {own.size}; CPUs {_listed(own.cpus)}; {', '.join(own.networks)}"
    findings = [(f"host {own.host}", host)]
    if place.rank == 0:
        findings.append((WRONG, why))
    return findings


def _without_launcher() -> list[Finding]:
    """What can be told where no launcher has started this process: the library, mpirun and Slurm."""
    allocation = find_allocation(os.environ)
    findings = [("MPI", mpi_library()), ("mpirun", shutil.which("mpirun") or "none on the PATH")]
    if allocation is not None:
        placed = ", ".join(
            f"{node}: {count}" for node, count in zip(allocation.nodes, allocation.tasks, strict=True)
        )
        nodes = "1 node" if len(allocation.nodes) == 1 else f"{len(allocation.nodes)} nodes"
        findings.append(("Slurm", f"{nodes} with tasks ({placed})"))
        return [*findings, ("ranks", "none; see them with: srun --mpi=pmix tutti doctor --mpi")]
    return [*findings, ("ranks", "none; see them with: mpirun -n 2 tutti doctor --mpi")]


if __name__ == "__main__":
    main()
