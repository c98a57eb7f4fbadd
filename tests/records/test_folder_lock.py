"""The lock on a run folder: one job at a time, and free again whatever dies."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from tests.forked import ForkedRanks
from tests.launch.processes import wait_for_files
from tutti.cli.main import main
from tutti.errors import BadRunFolder
from tutti.records.folder_lock import LOCK, FolderLock, refuse_locked
from tutti.records.run_folder import RunFolder, check_writable

TRAIN = ["train", "mlp", "--epochs", "100000", "-n", "1", "--out"]

HOLD = """
import os, sys, time
from pathlib import Path
from tutti.records.folder_lock import FolderLock
folder = Path(sys.argv[1])
with FolderLock(folder):
    if os.fork():
        (folder / "parent").write_text(str(os.getpid()))
    else:
        (folder / "child").write_text(str(os.getpid()))
    time.sleep(600)
"""

TAKE_TURNS = """
import os, sys
from pathlib import Path
from tutti.cli.main import main
from tutti.errors import BadRunFolder
from tutti.records.folder_lock import FolderLock
folder, turns = Path(sys.argv[1]), 0
while turns < 50:
    try:
        with FolderLock(folder):
            inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)
            os.close(inside)
            os.unlink(folder / "inside")
            turns += 1
    except BadRunFolder as error:
        assert "is being written by" in str(error), error
"""


def test_the_second_job_is_told_who_has_the_folder(tmp_path: Path) -> None:
    who = rf"^run folder {tmp_path} is being written by process {os.getpid()} on host {socket.gethostname()};"
    with FolderLock(tmp_path) as lock:
        for attempt in (FolderLock, refuse_locked, check_writable):
            with pytest.raises(BadRunFolder, match=who):
                attempt(tmp_path)
        assert lock.problem is None
    assert list(tmp_path.iterdir()) == []
    FolderLock(tmp_path).__exit__()


def test_the_lock_of_a_killed_job_is_free_even_if_something_it_forked_lives(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path])
    child = 0
    try:
        wait_for_files([tmp_path / "parent", tmp_path / "child"])
        child = int((tmp_path / "child").read_text())
        with pytest.raises(BadRunFolder, match=f"written by process {job.pid} on"):
            FolderLock(tmp_path)
        job.kill()
        job.wait()
        (tmp_path / "parent").unlink()
        (tmp_path / "child").unlink()
        check_writable(tmp_path)
        with FolderLock(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []
    finally:
        job.kill()
        job.wait()
        if child:
            os.kill(child, signal.SIGKILL)


def test_jobs_take_turns(tmp_path: Path) -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", TAKE_TURNS, tmp_path]) for _ in range(3)]
    assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_who_looks_takes_the_lock_from_nobody(tmp_path: Path) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            with suppress(BadRunFolder):
                refuse_locked(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            with FolderLock(tmp_path):
                pass
    finally:
        over.set()
        looking.join()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    refuse_locked(tmp_path)
    with FolderLock(tmp_path) as lock:
        assert lock.problem == "No locks available"
        refuse_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_under_its_lock_stays_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "mlp", "digits")
    with FolderLock(folder.path):
        shutil.rmtree(folder.path)
        assert not folder.path.exists()
        RunFolder.create(tmp_path / "run", "mlp", "digits")
        other = FolderLock(folder.path)
    assert (folder.path / LOCK).exists(), "it belongs to the other"
    other.__exit__()
    assert not (folder.path / LOCK).exists()


def test_nothing_is_written_into_a_folder_that_has_taken_the_place_of_the_locked_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "mlp", "digits")
    with FolderLock(folder.path) as lock:
        writing = replace(folder, lock=lock)
        writing.write_config({})
        # Who takes that for a stale one does no harm.
        (folder.path / LOCK).unlink()
        writing.write_weights(b"weights")
        shutil.rmtree(folder.path)
        RunFolder.create(folder.path, "mlp", "digits")
        for write in (lambda: writing.write_weights(b"others"), lambda: writing.write_config({})):
            with pytest.raises(BadRunFolder, match="was removed or renamed while the run went on"):
                write()
        assert [path.name for path in folder.path.iterdir()] == ["ranks"]


def test_folders_without_a_name_of_their_own_are_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tutti.records.run_folder.folder_name", lambda model, data: "name")
    # Each looks before any of the others has made its folder.
    monkeypatch.setattr(
        Path, "exists", lambda path: not path.name.startswith("name") and os.path.exists(path)
    )
    made = [RunFolder.create(None, "mlp", "digits").path.name for _ in range(3)]
    assert made == ["name", "name-2", "name-3"]


def test_a_second_command_with_the_folder_of_the_first_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def train(_: object) -> None:
        with redirect_stdout(StringIO()):
            main([*TRAIN, str(folder)])

    with ForkedRanks(lambda rank: rank, [0]) as forked:
        forked.start(train)
        wait_for_files([folder / "history.jsonl"])
        assert main([*TRAIN, str(folder)]) == 2
        first = forked.processes[0].pid
        assert f"run folder {folder} is being written by process {first} on host" in capsys.readouterr().err
        forked.kill(0)
        forked.processes[0].join()
        refuse_locked(folder)


def test_who_has_just_been_killed_may_take_a_while_to_be_gone(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    with FolderLock(tmp_path, patience_s=60.0) as lock:
        assert not lock.lost
        os.close(held._file)  # The kernel does no more.
        lock._waits.join(60.0)
        with pytest.raises(BadRunFolder, match="is being written by"):
            FolderLock(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_another_job_keeps_is_lost(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with FolderLock(tmp_path, patience_s=0.05) as lock:
            lock._waits.join(0.1)
            assert lock.lost
        with pytest.raises(BadRunFolder, match="is being written by"):
            refuse_locked(tmp_path)
