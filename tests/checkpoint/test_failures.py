"""Bad disks and killed writers: training goes on, and the last good checkpoint is kept."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
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
from tutti.comm.virtual.world import VirtualWorld

KILLS = int(os.environ.get("TUTTI_KILLS", "12"))


def newest_step(folder: Path) -> int:
    found = newest(folder)
    assert found.passed_over == []
    assert found.checkpoint is not None
    ranks = found.checkpoint.ranks
    check(found.checkpoint.saved(0, ranks), 0, ranks, found.checkpoint.step, ranks)
    return found.checkpoint.step


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


def meet_a_bad_disk(folder: str) -> None:
    """Save on a small disk, which fills, turns read-only and is changed meanwhile; print what is seen."""
    disk, seen = Path(folder), list[tuple[list[str], int]]()
    run = disk / "run"
    stuck, leftover = run / "step-00000007", run / ".step-00000001.of-another.unfinished"

    def mount(options: str, path: Path = disk) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)

    def copy_as_programs_do_that_follow_links() -> None:
        (run / "latest").unlink()
        shutil.copytree(run / "step-00000006", run / "latest")

    def move_to_another_place() -> None:
        (run / "step-00000006").rename(disk / "moved")
        (run / "step-00000006").symlink_to(disk / "moved")

    def make_irremovable() -> None:
        leftover.mkdir()
        for path in (stuck, leftover):
            mount("size=4k", path)

    def make_removable() -> None:
        for path in (stuck, leftover):
            subprocess.run(["umount", path], check=True)

    def save(comm: Communicator) -> None:
        warnings: list[str] = []
        with Saver(comm, run, 2, warnings.append) as saver:
            for step, prepare in enumerate(
                [
                    lambda: None,
                    lambda: (disk / "data").write_bytes(bytes(free_bytes())),
                    lambda: None,
                    lambda: (disk / "data").unlink(),
                    lambda: mount("remount,ro"),
                    lambda: mount("remount,rw"),
                    copy_as_programs_do_that_follow_links,
                    move_to_another_place,
                    make_irremovable,
                    make_removable,
                    put_another_in_its_place,
                ],
                start=1,
            ):
                prepare()
                there = run if step < 11 else disk / "renamed"
                saver.save(step, state_of(0, 1, step), wait=True)
                seen.append((warnings[:], newest_step(there)))
                warnings.clear()

    def put_another_in_its_place() -> None:
        run.rename(disk / "renamed")
        run.mkdir()

    def free_bytes() -> int:
        found = os.statvfs(disk)
        return found.f_bavail * found.f_frsize - 8192

    mount("size=1m")
    VirtualWorld(1).run(save)
    assert list(run.iterdir()) == []
    assert (disk / "renamed/latest").is_symlink()
    left = [path.name for path in (disk / "renamed").iterdir()]
    print(json.dumps([seen, sorted(left)]))


def test_a_disk_that_is_full_or_read_only_or_changed(tmp_path: Path) -> None:
    program = f"from {__name__} import meet_a_bad_disk; meet_a_bad_disk({str(tmp_path)!r})"
    alone = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run(
        [*alone, "mount", "-t", "tmpfs", "none", tmp_path], stderr=subprocess.DEVNULL
    ).returncode:
        pytest.skip("needs a mount namespace")
    done = subprocess.run([*alone, sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    seen, left = json.loads(done.stdout)
    full = (
        f"was not written: cannot write {tmp_path}/run: No space left on device; the ones before it are kept"
    )
    read_only = f"was not written: cannot write {tmp_path}/run"
    stuck = (
        "is written, but what it replaces is still there: cannot change "
        f"{tmp_path}/run/step-00000007: Device or resource busy"
    )
    expected = [("", 1), (full, 1), (full, 1), ("", 4), (read_only, 4)]
    another = f"was not written: cannot write {tmp_path}/run: it was removed, and another one is in its place"
    expected += [("", 6), ("", 7), ("", 8), (stuck, 9), ("", 10), (another, 10)]
    for step, ((warnings, last), (warning, good)) in enumerate(zip(seen, expected, strict=True), start=1):
        assert [f"step {step} {warning}" in one for one in warnings] == [True] * bool(warning), warnings
        assert last == good
    assert left == ["latest", "step-00000009", "step-00000010"]


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
