"""The processor of this host."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the name of the processor."""
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpuinfo() -> list[str]:
    """Return what the kernel says of the processor, line by line; nothing where it does not."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
