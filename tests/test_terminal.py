"""A run outlasts a full disk under what it prints; where its folder has no room, it does not begin."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutti.cli.main import main
from tutti.errors import BadRunFolder, UserError, no_room
from tutti.records.run import Summary
from tutti.records.run_folder import RunFolder, check_writable
from tutti.terminal import LastingFile

TUTTI = f"{sys.executable} -m tutti"
TRAIN = f"{TUTTI} train mlp --model.hidden 8 --epochs 2 --out run"
PATIENCE_S = 100


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell; what is not redirected there is captured."""
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_what_finds_no_room_is_lost_and_said_later() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    file = LastingFile(full)
    assert file.write(b"lost") == 4
    assert file.problem is not None
    assert file.problem.strerror == "No space left on device"
    os.close(full)


def test_a_reader_that_has_gone_is_no_full_disk() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = LastingFile(writing)
    with pytest.raises(BrokenPipeError):
        file.write(b"for nobody")
    assert file.problem is None
    os.close(writing)


def test_a_full_disk_under_the_output_costs_no_weights(tmp_path: Path) -> None:
    done = shell(tmp_path, f"{TRAIN} -n 2 > /dev/full")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    summary = RunFolder.open(tmp_path / "run").read(Summary)
    assert summary.epochs == 2


@pytest.mark.parametrize(("where", "code"), [("> /dev/full", 1), (">&-", 0), (">&- 2>&-", 0), ("2>&-", 0)])
def test_the_exit_code_says_whether_the_output_is_all_there(tmp_path: Path, where: str, code: int) -> None:
    done = shell(tmp_path, f"{TUTTI} --help {where}")
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_closed_output_is_not_taken_for_the_next_file(tmp_path: Path) -> None:
    done = shell(tmp_path, f"{TRAIN} -n 1 >&-")
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(tmp_path / "run").read(Summary).epochs == 2
    assert not any(b"epoch 1/2" in path.read_bytes() for path in (tmp_path / "run").glob("*.*"))


def test_a_limit_on_files_that_leaves_no_shared_memory_is_one_message(tmp_path: Path) -> None:
    done = shell(tmp_path, f"ulimit -f 100; {TRAIN} -n 2")
    assert done.returncode == UserError.exit_code
    assert "ulimit -f unlimited" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_does_not_begin_where_its_weights_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2600))
    rest = ["--steps", "1", "-n", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "mlp", *rest]) == 2
    assert "2,600 bytes free" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    # 64 x 10 weights and 10 biases, of 4 bytes each.
    assert main(["train", "mlp", "--model.hidden", "[]", *rest]) == 0


def test_a_limit_on_files_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, resource.RLIM_INFINITY))
    check_writable(tmp_path / "run", needed_bytes=1000)
    with pytest.raises(BadRunFolder, match="1,001"):
        check_writable(tmp_path / "run", needed_bytes=1001)


def test_lack_of_room_is_told_from_other_errors() -> None:
    found = no_room(OSError(28, "No space left on device", "weights"))
    assert isinstance(found, UserError)
    assert "weights" in str(found)
    assert no_room(FileNotFoundError(2, "No such file", "x")) is None


def test_an_error_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "\x1b[31mred"]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\x1b[31mred" in error
