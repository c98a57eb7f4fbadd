"""Checkpoints of several ranks: taken, written by another process, and read by another number of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.checkpoint.states import check, state_of
from tests.comm.ranks import World
from tutti.checkpoint import reading
from tutti.checkpoint.reading import newest, open_checkpoint
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadRunFolder
from tutti.state import State


def save(comm: Communicator, folder: Path, steps: list[int], keep: int = 3) -> list[str]:
    """Save some steps, waiting for each; returns the warnings."""
    warnings: list[str] = []
    with Saver(comm, folder, keep, warnings.append) as saver:
        for step in steps:
            assert saver.save(step, state_of(comm.rank, comm.size, step), {"epoch": step}, wait=True)
            assert comm.rank > 0 or warnings or saver.last == step
    return warnings


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_any_number_of_ranks_continues(tmp_path: Path, ranks: int, hosts: int) -> None:
    assert VirtualWorld(ranks, hosts).run(save, tmp_path / "checkpoints", [7]) == [[]] * ranks
    found, passed_over = newest(tmp_path / "checkpoints")
    assert passed_over == []
    assert found is not None
    assert (found.step, found.ranks, found.facts) == (7, ranks, {"epoch": 7})
    for others in range(1, 6):
        for rank in range(others):
            check(found.saved(rank, others), rank, others, 7, ranks)


def test_processes_of_a_host(tmp_path: Path) -> None:
    with World(3) as world:
        assert world.run(save, tmp_path, [1, 2]) == [[]] * 3
    check(open_checkpoint(tmp_path / "latest").saved(2, 3), 2, 3, 2, 3)
    check(open_checkpoint(tmp_path / "step-00000001").saved(0, 2), 0, 2, 1, 3)


def share(comm: Communicator, folder: Path, sees: bool, step: int) -> Path:
    found = open_checkpoint(folder / "latest") if comm.rank == 0 else None
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank >= 2 and not sees:
            patch.setattr(reading, "_sees", lambda *_: False)
        checkpoint = reading.for_all(TwoHosts(comm), found)  # type: ignore[arg-type]
    assert checkpoint.facts == {"epoch": step}
    check(checkpoint.saved(comm.rank, 4), comm.rank, 4, step, 3)
    return checkpoint.path


@pytest.mark.parametrize("sees", [True, False])
def test_a_checkpoint_comes_to_hosts_that_do_not_see_it(tmp_path: Path, sees: bool) -> None:
    VirtualWorld(3).run(save, tmp_path, [7])
    with World(4) as world:
        paths = world.run(share, tmp_path, sees, 7)
    assert [path.exists() for path in paths] == [True, True, sees, sees]


class TwoHosts:
    """The ranks of a host as if they were on two of them."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.node = comm.split(comm.rank // 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def save_on_two_hosts(comm: Communicator, folder: Path, steps: list[int]) -> list[str]:
    return save(TwoHosts(comm), folder, steps)  # type: ignore[arg-type]


def test_the_first_host_writes_for_all(tmp_path: Path) -> None:
    with World(4) as world:
        assert world.run(save_on_two_hosts, tmp_path, [1, 2, 3, 4]) == [[]] * 4
    assert len([*tmp_path.glob("step-*")]) == 3
    for rank in range(4):
        check(open_checkpoint(tmp_path / "latest").saved(rank, 4), rank, 4, 4, 4)


def save_what_changes(comm: Communicator, folder: Path, change: Callable[[int, int], State]) -> None:
    with Saver(comm, folder) as saver:
        for step in range(3):
            saver.save(step, change(comm.rank, step), {"history": ["x" * 10_000 * step]}, wait=True)


def test_states_may_grow(tmp_path: Path) -> None:
    def grown(rank: int, step: int) -> State:
        return State(own={"tensor": torch.full((1 << (9 * step + rank),), step), "text": "x" * 50_000 * step})

    with World(2) as world:
        world.run(save_what_changes, tmp_path, grown)
    checkpoint = open_checkpoint(tmp_path / "latest")
    assert checkpoint.facts == {"history": ["x" * 20_000]}
    for rank in range(2):
        own = checkpoint.saved(rank, 2).own
        assert own is not None
        assert torch.equal(own["tensor"], torch.full((1 << (18 + rank),), 2))
        assert own["text"] == "x" * 100_000


def leave_out(comm: Communicator, folder: Path) -> tuple[list[bool], list[str]]:
    warnings: list[str] = []
    with Saver(comm, folder, 3, warnings.append) as saver:
        saver.save(1, state_of(comm.rank, 2, 1), wait=True)
        if comm.rank == 0:
            [writer] = psutil.Process().children()
            writer.suspend()
        taken = [saver.save(step, state_of(comm.rank, 2, step)) for step in (2, 3, 4)]
        if comm.rank == 0:
            writer.resume()
        taken.append(saver.save(5, state_of(comm.rank, 2, 5), wait=True))
    return taken, warnings


def test_a_checkpoint_is_left_out_while_the_one_before_is_written(tmp_path: Path) -> None:
    with World(2) as world:
        (taken, warnings), (others, nothing) = world.run(leave_out, tmp_path)
    assert taken == others == [True, False, False, True]
    assert nothing == []
    [warning] = warnings
    assert "the checkpoint of step 3 was left out" in warning
    for step in (1, 2, 5):
        check(open_checkpoint(tmp_path / f"step-0000000{step}").saved(1, 2), 1, 2, step, 2)


def ask_to_stop(comm: Communicator, folder: Path) -> None:
    with Saver(comm, folder) as saver:
        saver.save(1, state_of(0, 1, 1), wait=True)
        [writer] = psutil.Process().children()
        assert writer.nice() == 19
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(writer.pid, number)
        saver.save(2, state_of(0, 1, 2), wait=True)
        assert saver.last == 2


def test_signals_to_all_processes_leave_the_writer_alone(tmp_path: Path) -> None:
    with World(1) as world:
        world.run(ask_to_stop, tmp_path)


def test_nothing_is_left_when_a_rank_is_killed(tmp_path: Path) -> None:
    with World(1) as world:
        world.start(wait_with_a_writer, tmp_path)
        rank = psutil.Process(world.processes[0].pid)
        while not (children := rank.children()) or not (tmp_path / "latest").exists():
            pass
        world.kill(0)
        psutil.wait_procs(children, timeout=30)
        assert not [child for child in children if child.is_running()]


def wait_with_a_writer(comm: Communicator, folder: Path) -> None:
    with Saver(comm, folder) as saver:
        saver.save(1, state_of(0, 1, 1), wait=True)
        signal.pause()


def refuse(comm: Communicator, folder: Path) -> str:
    with pytest.raises(BadRunFolder) as caught:
        Saver(comm, folder)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_refused_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert set(VirtualWorld(2).run(refuse, tmp_path / "file" / "run")) == {
        f"cannot write {tmp_path}/file/run: Not a directory; name a folder that you may write with --out"
    }
