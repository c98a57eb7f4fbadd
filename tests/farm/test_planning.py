"""Tests of the plan of a farm: which ranks run on which cores, with which threads."""

from __future__ import annotations

from tutti.launch.cores import Cores


def machine(cores: int, threads: int = 1, quota: int | None = None, first: int = 0) -> Cores:
    """A machine, or what taskset or a launcher leaves of it: cores from `first` on."""
    physical = tuple(tuple(first + core + 64 * i for i in range(threads)) for core in range(cores))
    return Cores(physical, quota)
