"""What every benchmark here needs: sides measured in turn, a description of the machine, and a table.

Sides are interleaved (a b c, a b c, ...), so that a machine that slows down meanwhile slows all of them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil
import torch


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int = 5) -> dict[str, list[float]]:
    """Measure every side once in each round, after one round that does not count.

    Args:
        sides: by name, what measures once and returns a number, such as samples per second.
        rounds: how many measurements each side gets.

    Returns:
        The measurements of each side, in the order in which they were made.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(rounds):
        for name, side in sides.items():
            measured[name].append(side())
    return measured


def medians(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side's measurements."""
    return {name: median(values) for name, values in measured.items()}


def describe_machine() -> str:
    """The processor, the cores that this process may use, the memory, the versions and the load."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = psutil.virtual_memory().total / 2**30
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{_processor()}; {cores} of {os.cpu_count()} cores allowed, {memory_gib:.0f} GiB; "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}; load average: {load}"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, its columns aligned; the first column to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(heads, *texts, strict=True)]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([_line(heads, widths), rule, *(_line(row, widths) for row in texts)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "| " + " | ".join(aligned) + " |"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
