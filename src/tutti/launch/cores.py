"""The cores that this process may use: affinity, the control group's quota, and hyperthreads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from tutti.free_memory import control_groups
from tutti.launch.allocation import cores_of, cpus_here

CONTROL_GROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")

BINDING: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""The variables by which an OpenMP runtime, such as torch's, binds threads to cores when it is loaded."""


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use."""

    physical: tuple[tuple[int, ...], ...]  # the logical CPU numbers of each physical core
    quota: int | None = None  # the CPU time granted by the control group and Slurm, in whole cores

    @property
    def logical(self) -> tuple[int, ...]:
        """All allowed logical CPUs, hyperthreads included."""
        return tuple(sorted(cpu for core in self.physical for cpu in core))

    @property
    def usable(self) -> int:
        """The number of cores' worth of time: the physical cores, or the quota when it is less."""
        return len(self.physical) if self.quota is None else min(len(self.physical), self.quota)

    @property
    def limited(self) -> bool:
        """True if the quota grants less time than the allowed logical CPUs have."""
        return self.quota is not None and self.quota < len(self.logical)


def allowed_cores() -> Cores:
    """Return the cores that the kernel, and Slurm if it binds no process, allow this process."""
    physical = group_siblings(sorted(os.sched_getaffinity(0)), TOPOLOGY)
    granted = cpu_quota(CONTROL_GROUPS, Path("/proc/self/cgroup"))
    quotas = [] if granted is None else [max(1, int(granted))]
    if (cpus := cpus_here(os.environ)) is not None:
        cores = cores_of(cpus, len(physical), sum(map(len, physical)))
        quotas += [] if cores is None else [cores]
    return Cores(physical, min(quotas, default=None))


def leave_binding_to_tutti() -> None:
    """Keep OpenMP runtimes from binding threads: in each of several ranks they would take the same cores."""
    for name in BINDING:
        os.environ.pop(name, None)


def bind(cpus: Iterable[int]) -> None:
    """Bind every thread of this process to these logical CPUs."""
    # The kernel's call is for one thread, and a pool may have threads already.
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)


def group_siblings(allowed: Iterable[int], topology: Path) -> tuple[tuple[int, ...], ...]:
    """Return the allowed logical CPUs by physical core; each alone if the topology cannot be read."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(set(allowed)):
        try:
            siblings = parse_cpu_list((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except (OSError, ValueError):
            siblings = [cpu]
        cores.setdefault(tuple(siblings), []).append(cpu)
    return tuple(map(tuple, cores.values()))


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers in the kernel's notation for lists of CPUs, such as "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def cpu_quota(mount: Path, membership: Path) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's control group and those above it."""
    quotas: list[float] = []
    for folder in control_groups(mount, membership):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas += [] if quota == "max" else [int(quota) / int(period)]
    return min(quotas, default=None)


def share_of(rank: int, ranks: Sequence[Cores]) -> int:
    """Return the threads of a host's `rank`: its share of each core that it may use, or of the quota."""
    users = Counter(core for one in ranks for core in one.physical)
    share = sum((Fraction(1, users[core]) for core in ranks[rank].physical), Fraction())
    quota = ranks[rank].quota
    return max(1, int(share if quota is None else min(share, Fraction(quota, len(ranks)))))


def cpuinfo(name: str) -> str:
    """Return the kernel's value for a name in /proc/cpuinfo; empty if there is none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def processor_flags() -> set[str]:
    """Return the units and instructions that the processor has, by the kernel's names for them."""
    return set((cpuinfo("flags") or cpuinfo("Features")).split())
