"""The memory still available to a process: of the machine, and of its control groups (version 2)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_MOUNT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


def free_bytes(meminfo: Path = _MEMINFO, mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the least of the free bytes of the machine and of each control group; None if unknown."""
    limits: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    for folder in control_groups(mount, membership):
        with suppress(OSError, ValueError):
            most, taken = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            stat = dict(one.split() for one in (folder / "memory.stat").read_text().splitlines())
            limits.append(max(0, most - taken + int(stat.get("inactive_file", 0))))  # reclaimable
    return min(limits, default=None)


def control_groups(mount: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's control group and those above it; none if they are unknown."""
    with suppress(OSError, StopIteration):
        lines = membership.read_text().splitlines()
        group = Path(next(line[3:].lstrip("/") for line in lines if line.startswith("0::")))
        # In a container the path may be the host's and not exist here; then the root's files count.
        return [mount / one for one in (group, *group.parents)]
    return []
