"""Checkpoints of several ranks: taken, written by another process, and read by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.states import check, state_of
from tests.comm.ranks import World
from tutti.checkpoint.reading import newest, open_checkpoint
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld


def save(comm: Communicator, folder: Path | None, steps: list[int], keep: int = 3) -> list[str]:
    """Save some steps, waiting for each; returns the warnings."""
    warnings: list[str] = []
    with Saver(comm, folder, keep, warnings.append) as saver:
        for step in steps:
            assert saver.save(step, state_of(comm.rank, comm.size, step), {"epoch": step}, wait=True)
            assert comm.rank > 0 or warnings or saver.last == step
    return warnings


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_any_number_of_ranks_goes_on(tmp_path: Path, ranks: int, hosts: int) -> None:
    assert VirtualWorld(ranks, hosts).run(save, tmp_path / "checkpoints", [7]) == [[]] * ranks
    found = newest(tmp_path / "checkpoints")
    assert found.passed_over == []
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.checkpoint.ranks) == (7, ranks)
    assert found.checkpoint.facts == {"epoch": 7}
    for others in range(1, 6):
        for rank in range(others):
            check(found.checkpoint.saved(rank, others), rank, others, 7, ranks)


def test_processes_of_a_host(tmp_path: Path) -> None:
    with World(3) as world:
        assert world.run(save, tmp_path, [1, 2]) == [[]] * 3
    check(open_checkpoint(tmp_path / "latest").saved(2, 3), 2, 3, 2, 3)
    check(open_checkpoint(tmp_path / "step-00000001").saved(0, 2), 0, 2, 1, 3)
