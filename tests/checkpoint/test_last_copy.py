"""The last copy of the state in memory becomes a checkpoint on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from tests.checkpoint.states import check, state_of
from tutti.checkpoint.memory_files import StateMemory
from tutti.checkpoint.reading import newest
from tutti.checkpoint.saver import MemorySaver, Saver
from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import PeerLost
from tutti.run.start import _last_copy_kept


@pytest.fixture
def memory() -> Iterator[StateMemory]:
    """A memory with copies of the states after steps 4 and 5."""
    with closing(StateMemory()) as made:
        with closing(HostCommunicator.alone()) as comm, closing(MemorySaver(comm, made.place)) as saver:
            for step in (4, 5):
                saver.save(step, state_of(0, 1, step), {"epoch": step})
        yield made


def step_on_disk(folder: Path) -> int | None:
    """Check the newest checkpoint; returns its step."""
    found, passed_over = newest(folder)
    assert passed_over == []
    if found is None:
        return None
    check(found.saved(0, 1), 0, 1, found.step, 1)
    assert found.facts == {"epoch": found.step}
    return found.step


def save_on_disk(folder: Path, step: int) -> None:
    with closing(HostCommunicator.alone()) as comm, Saver(comm, folder) as saver:
        saver.save(step, state_of(0, 1, step), {"epoch": step})


def test_the_last_copy_becomes_a_checkpoint_beside_those_before_it(
    memory: StateMemory, tmp_path: Path
) -> None:
    save_on_disk(tmp_path, 2)
    memory.place.write_last(tmp_path, keep=3)
    assert step_on_disk(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000005"]
    assert (tmp_path / "latest").resolve().name == "step-00000005"
    written = (tmp_path / "latest").stat().st_mtime_ns
    memory.place.write_last(tmp_path, keep=3)
    assert (tmp_path / "latest").stat().st_mtime_ns == written


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(path: Path, *_: int) -> NoReturn:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("tutti.checkpoint.writer_process.write_file", write_some)


def fail(memory: StateMemory) -> None:
    """Have a run fail that has lost too many ranks."""
    with pytest.raises(PeerLost, match="once too often"), _last_copy_kept(memory.place, 3):
        raise PeerLost([0], "once too often")


def test_a_copy_lost_on_a_full_disk_is_reported(
    memory: StateMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.place.note_folder(tmp_path)
    fill_the_disk(monkeypatch)
    fail(memory)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "which is lost: [Errno 28] No space left on device" in warning
