"""The nodes and CPUs that Slurm has allocated to the job of this process, if it is part of one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """The allocation of a job."""

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of the job that the environment belongs to; None outside Slurm's jobs."""
    listed = environ.get("SLURM_JOB_NODELIST", "")
    if not environ.get("SLURM_JOB_ID") or not listed:
        return None
    nodes = expand_nodes(listed)
    tasks = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(nodes):
        tasks = (1,) * len(nodes)
    return Allocation(nodes, tasks)


def expand_nodes(listed: str) -> tuple[str, ...]:
    """Return the names in a list such as "gpu[03-05,12],cpu1"."""
    # Commas inside of brackets do not end a name, and a name may have several pairs of them.
    names = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    return tuple(name for pattern in names for name in _names(pattern))


def _names(pattern: str) -> Iterator[str]:
    parts = re.split(r"\[([^\]]*)\]", pattern)
    choices = [list(_numbers(part)) if place % 2 else [part] for place, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(listed: str) -> Iterator[str]:
    """Yield the numbers of a list such as "03-05,12", with the zeros before them."""
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            yield part
            continue
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def expand_counts(listed: str) -> tuple[int, ...]:
    """Return the numbers in a list such as "4(x2),3"; none if it is something else."""
    counts: list[int] = []
    for part in filter(None, listed.split(",")):
        count, _, repeat = part.partition("(x")
        try:
            counts += [int(count)] * int(repeat.rstrip(")") or 1)
        except ValueError:
            return ()
    return tuple(counts)


def cpus_here(environ: Mapping[str, str]) -> int | None:
    """Return the job's (or srun step's) number of CPUs on this node; None outside Slurm's jobs."""
    told = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(told) if environ.get("SLURM_JOB_ID") and told.isdecimal() and int(told) > 0 else None


def cores_of(cpus: int, physical: int, logical: int) -> int | None:
    """Return the cores that `cpus` allocated hyperthreads are; None if the process may use no others."""
    return None if cpus >= logical else max(1, cpus * physical // logical)


def in_words(nodes: Sequence[str], most: int = 8) -> str:
    """Return the names of nodes for a message; of many, the first ones."""
    shown = ", ".join(nodes[:most])
    return shown if len(nodes) <= most else f"{shown} and {len(nodes) - most} more"
