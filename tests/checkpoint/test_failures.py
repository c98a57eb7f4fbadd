"""Bad disks and killed writers: training continues, and the last good checkpoint is kept."""

from __future__ import annotations

import os
import random
import resource
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.checkpoint.states import check, state_of
from tests.comm.ranks import World
from tutti.checkpoint.reading import newest
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator

KILLS = int(os.environ.get("TUTTI_KILLS", "12"))


def newest_step(folder: Path) -> int:
    found, passed_over = newest(folder)
    assert passed_over == []
    assert found is not None
    check(found.saved(0, found.ranks), 0, found.ranks, found.step, found.ranks)
    return found.step


def kill(victim: psutil.Process) -> None:
    """Kill a process; it is dead when this returns."""
    with suppress(psutil.NoSuchProcess):
        victim.kill()
        while victim.status() != psutil.STATUS_ZOMBIE:
            pass


def kill_writers(comm: Communicator, folder: Path, kills: int) -> tuple[list[int | None], list[str]]:
    """Kill the writer after a random while, several times; returns what was seen."""
    warnings: list[str] = []
    chance, outcomes = random.Random(0), list[int | None]()
    with Saver(comm, folder, 2, warnings.append) as saver:
        begun = time.monotonic()
        saver.save(1, state_of(0, 1, 1), wait=True)
        usual_s, before = time.monotonic() - begun, 1
        for step in range(2, 2 + kills):
            saver.save(step, state_of(0, 1, step))
            time.sleep(chance.uniform(0, 1.2 * usual_s))
            victims = psutil.Process().children()
            if victims:
                kill(chance.choice(victims))
            saver.wait()
            last = newest_step(folder)
            # A process that is killed in a system call finishes it: the one before may be whole after all.
            lost = last >= before and warnings and f"step {step} was not written" in warnings[-1]
            assert last == step or lost, (step, last, before, warnings[-1:])
            before = last
            outcomes.append(step if last == step else None)
        saver.save(step + 1, state_of(0, 1, step + 1), wait=True)
        assert saver.last == newest_step(folder) == step + 1
        # One that is killed when it has nothing to do costs nothing.
        for victim in psutil.Process().children():
            step += 1
            kill(victim)
            saver.save(step + 1, state_of(0, 1, step + 1), wait=True)
            assert saver.last == newest_step(folder) == step + 1
    return outcomes, warnings


@pytest.mark.timeout(60 + 5 * KILLS)
def test_a_killed_writer_costs_one_checkpoint_at_most(tmp_path: Path) -> None:
    with World(1) as world:
        [(outcomes, warnings)] = world.run(kill_writers, tmp_path / "run", KILLS)
    print(f"{KILLS} writers killed, {outcomes.count(None)} checkpoints lost, the ones before them all good")
    assert len(outcomes) == KILLS
    assert all("was not written: the process that writes it was killed" in warning for warning in warnings)
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def save_under_a_limit(comm: Communicator, folder: Path) -> list[str]:
    """Save while no file may be written, and once more when they may."""
    warnings: list[str] = []
    with Saver(comm, folder, 2, warnings.append) as saver:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        saver.save(1, state_of(comm.rank, 2, 1), wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if comm.rank == 0:  # The process that writes has the limit as well.
            for writer in psutil.Process().children():
                resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limits)
        comm.barrier()
        saver.save(2, state_of(comm.rank, 2, 2), wait=True)
    return warnings


def test_a_first_checkpoint_that_no_file_may_hold_is_a_warning(tmp_path: Path) -> None:
    with World(2) as world:
        (warning,), _ = world.run(save_under_a_limit, tmp_path)
    assert warning.startswith("the checkpoint of step 1 was not written: cannot write")
    assert newest_step(tmp_path) == 2
