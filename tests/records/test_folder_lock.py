"""The lock on a run folder: one job at a time, and free again whatever dies."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.launch.processes import wait_for_files
from tutti.errors import BadRunFolder
from tutti.records.folder_lock import FolderLock, refuse_locked
from tutti.records.launches import Launch
from tutti.records.run_folder import RunFolder, check_writable

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


def test_the_second_job_is_told_who_has_the_folder(tmp_path: Path) -> None:
    who = rf"^run folder {tmp_path} is being written by process {os.getpid()} on host {socket.gethostname()};"
    with FolderLock(tmp_path) as lock:
        for attempt in (FolderLock, refuse_locked, check_writable):
            with pytest.raises(BadRunFolder, match=who):
                attempt(tmp_path)
        assert lock.problem is None
    refuse_locked(tmp_path)
    FolderLock(tmp_path).release()


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
        refuse_locked(tmp_path)
    finally:
        job.kill()
        job.wait()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with FolderLock(tmp_path) as lock:
        assert lock.problem == "No locks available"
        refuse_locked(tmp_path)
    with Launch(tmp_path) as launch, pytest.raises(BadRunFolder, match="has no locks"):
        launch.claim("job")


def test_a_job_waits_for_processes_that_were_killed_to_be_gone(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    threading.Timer(0.05, held.release).start()
    with FolderLock(tmp_path, patience_s=60.0), pytest.raises(BadRunFolder, match="is being written by"):
        FolderLock(tmp_path)


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
