"""The memory that a process may still take: of the machine, and of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_MOUNT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")

_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of version 2 and version 1: the limit, what is used, and what of that can be taken back at once."""


def free_bytes(meminfo: Path = _MEMINFO, mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the least of the machine's free bytes and each control group's; None: it is not known."""
    found = list(_free_in_groups(mount, membership))
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    return min(found, default=None)


def _free_in_groups(mount: Path, membership: Path) -> Iterator[int]:
    """Yield what is free in the control groups of this process and those above."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, group = mount / "memory" if controllers else mount, Path(path.lstrip("/"))
            # In a container the path may be the host's and not exist here; then the root's files count.
            for folder in (root / one for one in (group, *group.parents)):
                for limit, used, reclaimed in _FILES:
                    with suppress(OSError, ValueError):
                        most, taken = (int((folder / one).read_text()) for one in (limit, used))
                        stat = dict(one.split() for one in (folder / "memory.stat").read_text().splitlines())
                        yield max(0, most - taken + int(stat.get(reclaimed, 0)))
