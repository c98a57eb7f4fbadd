"""Damaged checkpoints are found before a tensor is used, and the one before is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.states import check, state_of
from tutti.checkpoint.reading import Checkpoint, newest, open_checkpoint
from tutti.checkpoint.saver import Saver
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadCheckpoint
from tutti.records import checkpoints


def save(comm: Communicator, folder: Path, steps: dict[int, float | None], run: str, keep: int) -> None:
    with Saver(comm, folder, keep) as saver:
        for step, score in steps.items():
            saver.save(step, state_of(comm.rank, comm.size, step), {"run": run}, score)


def make(folder: Path, steps: dict[int, float | None], run: str = "this", keep: int = 99) -> Path:
    VirtualWorld(2).run(save, folder, steps, run, keep)
    return folder


def found(folder: Path) -> Checkpoint:
    checkpoint, _ = newest(folder)
    assert checkpoint is not None
    return checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    return make(tmp_path_factory.mktemp("run") / "good", {1: None, 2: None})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2 of another run."""
    return make(tmp_path_factory.mktemp("run") / "other", {2: None}, "other") / "step-00000002"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_the_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lose(file: Path) -> None:
    file.unlink()


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def repeat_a_key(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"{", b'{"step": 7, ', 1))


FILES = ("rank-00000.safetensors", "rank-00001.json", "run.json", checkpoints.MANIFEST)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_bit, cut_the_end, lose, make_a_folder, repeat_a_key])
def test_no_damaged_checkpoint_is_taken(
    good: Path, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    folder = shutil.copytree(good, tmp_path / "run", symlinks=True)
    damage(folder / "step-00000002" / name)
    checkpoint, passed_over = newest(folder)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert len(passed_over) == 1


def test_files_of_another_run_are_not_taken(good: Path, other: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "run", symlinks=True)
    shutil.copy(other / "run.json", folder / "step-00000002")
    with pytest.raises(BadCheckpoint, match=r"run\.json has other contents|run\.json has .* bytes"):
        open_checkpoint(folder / "step-00000002")
    with pytest.raises(BadCheckpoint, match="there is no such folder"):
        open_checkpoint(folder / "step-00000003")
    assert newest(tmp_path / "nowhere") == (None, [])


def test_a_newer_format_is_refused(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(good, folder, symlinks=True)
    manifest = folder / "step-00000002" / checkpoints.MANIFEST
    values = json.loads(manifest.read_bytes())
    del values["sha256"]
    manifest.write_bytes(checkpoints._sealed({**values, "format": checkpoints.FORMAT + 1, "new": []}))
    with pytest.raises(BadCheckpoint, match="has format 2"):
        open_checkpoint(folder / "step-00000002")
    assert "has format 2" in newest(folder)[1][0]


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {1: 0.1, 2: 0.9, 3: 0.9, 4: float("nan"), 5: None, 6: 0.2}, keep=2)
    assert [path.name for path in checkpoints.present(folder)] == [
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]
    assert found(folder).step == 6


def test_a_course_that_was_given_up_is_removed(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {1: 0.1, 2: 0.2, 3: 0.3})
    make(folder, {2: None}, "again")
    assert [path.name for path in checkpoints.present(folder)] == ["step-00000001", "step-00000002"]
    assert found(folder).facts == {"run": "again"}
    check(found(folder).saved(1, 2), 1, 2, 2, 2)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_one_that_is_replaced_counts_until_the_new_one_is_there(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(good, folder, symlinks=True)
    (folder / "step-00000002").rename(folder / "step-00000002.before")
    assert found(folder).step == 2
    make(folder, {2: None}, "again")
    assert found(folder).facts == {"run": "again"}
    assert len(checkpoints.present(folder)) == 2
