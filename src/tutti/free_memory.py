"""The memory that a process may still take: of the machine, and of its control groups."""

from __future__ import annotations

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
    """Return the bytes that may still be taken: the least of the machine's and of each control group's.

    Returns:
        None where the system does not say it.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    found += [free for folder in _folders(mount, membership) if (free := _free_in(folder)) is not None]
    return min(found, default=None)


def _folders(mount: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's control groups and of those above."""
    found = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root, group = mount / "memory" if controllers else mount, Path(path.lstrip("/"))
                # In a container the path may be the host's and not exist here; then the root's files count.
                found += [root / one for one in (group, *group.parents)]
    return found


def _free_in(folder: Path) -> int | None:
    for limit, used, reclaimed in _FILES:
        with suppress(OSError, ValueError):
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, most - taken + int(stat.get(reclaimed, 0)))
    return None
