"""The memory that is free, by the machine and by control groups, which decides whether data are streamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.free_memory import free_bytes


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """A machine with 8 GB to spare and a process in the control group a/b."""
    found = {"meminfo": tmp_path / "meminfo", "mount": tmp_path / "cgroup", "membership": tmp_path / "self"}
    found["meminfo"].write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (found["mount"] / "a/b").mkdir(parents=True)
    return found


def limit(folder: Path, most: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_a_machine_without_control_groups_has_what_is_available(machine: dict[str, Path]) -> None:
    assert free_bytes(**machine) == 8_000_000 * 1024


def test_the_strictest_control_group_counts(machine: dict[str, Path]) -> None:
    machine["membership"].write_text("0::/a/b\n")
    limit(machine["mount"] / "a", "1000", 700, 200)
    limit(machine["mount"] / "a/b", "max", 600, 0)
    assert free_bytes(**machine) == 500


def test_a_path_that_is_the_hosts_leaves_the_root_group(machine: dict[str, Path]) -> None:
    machine["membership"].write_text("0::/not/here\n")
    limit(machine["mount"], "1000", 400, 0)
    assert free_bytes(**machine) == 600


def test_nothing_is_known_where_the_system_does_not_say_it(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert free_bytes(missing, missing, missing) is None
